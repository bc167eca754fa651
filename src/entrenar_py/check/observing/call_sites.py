"""The lines of a script that call `backward`, step, iterate over a loader and save checkpoints.

Each line is looked up once, when the script first reaches it, because a walk up the stack at every
step would cost more than the hooks. A report points to these lines.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from entrenar_py.check.observing import COPY, FOLDER
from entrenar_py.shared import trace

_OWN = str(Path(__file__).parents[2]) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_REFERENCES = 3  # to a function's variables: from the function, from here, and from `getrefcount`
Site = tuple[str, int]  # file and line


def here() -> Site | None:
    """Return the script's line that runs now, in its innermost function; None if there is none.

    Libraries, both Python's own and installed ones, are not part of a script.
    """
    frame = own_frame()
    if frame is None:
        return None
    return in_place(Path(frame.f_code.co_filename).resolve()), frame.f_lineno


def own_frame() -> FrameType | None:
    """Return the frame of the script's innermost running function; None if there is none."""
    return next(own_frames(), None)


def own_frames() -> Iterator[FrameType]:
    """Yield the frames of the script's running functions in this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function, without keeping references to them.

    Up to Python 3.12 a frame keeps the dictionary of variables that was requested. It would keep
    objects alive that the script deletes, and would give each object one more name. A dictionary
    that the script itself got from `locals()` is not cleared.
    """
    variables = frame.f_locals
    copy = {**variables}
    is_optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if type(variables) is dict and is_optimized and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()
    return copy


def is_own(file: str) -> bool:
    """Return whether a source file is the script's: not of this package, Python or a library."""
    return not (file.startswith((_OWN, "<")) or _is_library(file))


def is_own_class(kind: type) -> bool:
    """Return whether a class is the script's: not of this package, Python or a library."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_own(file)


def is_ours(file: str) -> bool:
    """Return whether a file of code belongs to this package."""
    return file.startswith(_OWN)


def in_place(file: Path) -> str:
    """Return the path of `file` in the user's folder, even if it is in the run's copy of that."""
    if FOLDER not in os.environ:
        return str(file)
    copied = (Path(os.environ[FOLDER]) / COPY).resolve()
    return f"{os.sep}{file.relative_to(copied)}" if file.is_relative_to(copied) else str(file)


@functools.cache
def _is_library(file: str) -> bool:
    is_installed = any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED)
    return is_installed or file.startswith(_STANDARD)


class CallSites:
    """The call sites of one rank's script, each written as an event once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._written: set[str] = set()

    def event(self, what: str, site: Site | None) -> list[trace.Event]:
        """Return the event that says where `what` is called, once, if `site` is known; else []."""
        if site is None or what in self._written:
            return []
        self._written.add(what)
        if not trace.is_source_file(site[0]):
            return []  # code that was compiled under another name
        return [trace.Called(rank=self._rank, what=what, file=site[0], line=site[1])]

    def is_known(self, what: str) -> bool:
        """Return whether the event for `what` was returned."""
        return what in self._written


class Backward:
    """The place of the first backward pass of a record."""

    site: Site | None = None


class Samples:
    """The place where the script draws samples: its last loader, or its own report.

    Without the line `observe`, a record begins after the first loader. So the place is kept for the
    whole process.
    """

    site: Site | None = None

    @classmethod
    def drawn(cls) -> None:
        """Record that the script begins to iterate over a loader."""
        cls.site = here()

    @classmethod
    def reported(cls) -> None:
        """Record that the script reports samples. This counts only if no loader was seen."""
        cls.site = cls.site or here()
