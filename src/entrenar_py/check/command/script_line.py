"""The line `observe`: whether a command's script has it, or is to be observed without it.

Nothing is executed. Of an unknown script (a shell script ...), all files of the folder are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from entrenar_py.check.command.forks import imports
from entrenar_py.check.project import commands

FILES_MAX = 2000
_WITHOUT = ("__pycache__", "node_modules", "site-packages")


def is_in(command: Sequence[str], folder: Path) -> bool:
    """Return whether the script of a typed command, or a file that it imports, calls `observe`."""
    files = imported(command, folder) or (file for file in below(folder) if file.suffix == ".py")
    return any(_has_line(file) for file in islice(files, FILES_MAX))


def imported(command: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Return the script of a typed command, and the files that it imports; () if it is unknown."""
    launched = commands.of(command).command
    _, script = commands.script(launched, folder)
    if script is None or commands.is_for_shell(launched):
        return ()
    try:
        return imports.read_script(script, folder).files
    except ValueError:  # it can't be parsed, or imports very many files
        return (script,)


def below(folder: Path) -> Iterator[Path]:
    """Yield the files of a project, without hidden folders, compiled code and environments."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in _WITHOUT]
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        yield from (Path(place, name) for name in files)


def _has_line(file: Path) -> bool:
    known = commands.read_script(file)
    return known is not None and known.is_observed
