"""Prints line by line, to standard output or error: each text visible, none a traceback.

A reader that has gone, or a full disk, ends the printing and nothing else: who printed goes on, its
exit code says what it would have said, and `lost` why nobody can read it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from entrenar_py.untrusted import escaping

_lost: list[str] = []


def say(given: object, *, indent: int = 0) -> None:
    """Print `given` as one line on standard output, at once, behind `indent` spaces."""
    _print(" " * indent + escaping.line(given), sys.stdout)


def say_lines(given: str) -> None:
    """Print the lines of `given` on standard output, each by itself: a file for a person."""
    _print(escaping.text(given), sys.stdout)


def warn(given: object) -> None:
    """Print `given` as one line on standard error."""
    _print(escaping.line(given), sys.stderr)


def warn_lines(given: str) -> None:
    """Print the lines of `given` on standard error, each by itself: a list of problems, or a
    traceback, of which the line ends are ours.
    """
    _print(escaping.text(given), sys.stderr)


def give_up(error: OSError) -> None:
    """Print nothing more on standard output, also not by the interpreter at its end.

    A full disk is told of on standard error, once; a reader that has gone did so on purpose.
    """
    with suppress(OSError, ValueError):  # ValueError: what stands in its place has no number
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    if not isinstance(error, BrokenPipeError) and not _lost:
        _lost.append(error.strerror or str(error))
        warn(f"standard output can't be written ({_lost[0]}): what would stand there is lost")


def lost() -> bool:
    """Return whether something that was to be read was not written; asks once, and forgets."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        give_up(error)
    found = bool(_lost)
    _lost.clear()
    return found


def _print(text: str, stream: TextIO | None) -> None:
    if stream is None:  # closed when the process began (`>&-`): nobody wants to read it
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        if stream is sys.stdout:
            give_up(error)
