"""Printing of lines to standard output or error, with every character visible, without OSError.

When the reader of standard output has gone or the disk is full, printing stops and the program
continues with its own exit code. `lost` then reports that output is missing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from entrenar_py.shared.untrusted import escaping

_lost: list[str] = []


def say(text: object, *, indent: int = 0) -> None:
    """Print `text` as one line on standard output, after `indent` spaces, and flush."""
    _print(" " * indent + escaping.line(text), sys.stdout)


def say_lines(text: str) -> None:
    """Print `text`, such as the text of a file, on standard output with its own line ends."""
    _print(escaping.text(text), sys.stdout)


def warn(text: object) -> None:
    """Print `text` as one line on standard error."""
    _print(escaping.line(text), sys.stderr)


def warn_lines(text: str) -> None:
    """Print `text`, such as a traceback, on standard error with its own line ends."""
    _print(escaping.text(text), sys.stderr)


def give_up(error: OSError) -> None:
    """Stop printing on standard output, including the interpreter's own flush at exit.

    A full disk is reported on standard error, once. A broken pipe is not reported, since the reader
    closed it on purpose.
    """
    with suppress(OSError, ValueError):  # ValueError: a replaced stdout without a descriptor
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    if not isinstance(error, BrokenPipeError) and not _lost:
        _lost.append(error.strerror or str(error))
        warn(f"standard output can't be written ({_lost[0]}): the rest of the output is lost")


def lost() -> bool:
    """Return whether output was lost since the last call; output to a broken pipe doesn't count."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        give_up(error)
    found = bool(_lost)
    _lost.clear()
    return found


def _print(text: str, stream: TextIO | None) -> None:
    if stream is None:  # closed when the process started (`>&-`), so no reader is expected
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        if stream is sys.stdout:
            give_up(error)
