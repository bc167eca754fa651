"""Parsers for the values of command-line options, and the writing of output files.

A parser is the `type` of an option in argparse. It raises argparse.ArgumentTypeError with the text
and the allowed values. The path of an output file is checked before the run, which may take
minutes, and written after it.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping


def words(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated list. Raises for an empty list."""
    parts = tuple(word.strip() for word in text.split(",") if word.strip())
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r}: use one or more words, with commas between")
    return parts


def severities(text: str) -> tuple[str, ...]:
    """Return the clause severities in a comma-separated list."""
    parts = words(text)
    if not set(parts) <= {"P0", "P1", "P2"}:
        raise argparse.ArgumentTypeError(f"{text!r}: use P0, P1 or P2, with commas between")
    return parts


def natural(text: str, *, least: int = 0) -> int:
    """Return the integer that `text` spells, from `least` to 10^18 - 1."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {least} to 10^18 - 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the integers, each at least 1, of a comma-separated list."""
    return tuple(natural(word, least=1) for word in words(text))


def seconds(text: str) -> float:
    """Return the number of seconds that `text` spells, finite and above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number of seconds > 0")
    return number


def require_writable(path: Path, option: str, *, variable: str = "") -> None:
    """Check that a file can be written at `path`, without creating or opening it.

    `option` (such as `json`) supplied the path, or the environment variable `variable` if that is
    not "". Raises UsageError with field `option` for a directory, a missing folder, a pipe, a
    socket, or missing permission.
    """
    problem = _problem(path)
    if problem:
        flag = f"--{option.replace('_', '-')}" + (f": {variable}" if variable else "")
        raise UsageError(f"{flag} {path}: {problem}", field=option)


def _problem(path: Path) -> str:
    """Return why no file can be written at `path`, and what to do; "" if one can."""
    target = Path(os.path.realpath(path))  # for a link, check its target
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return _folder_problem(target.parent)
    except OSError as error:
        return f"{error.strerror}; give a path to a file"
    if stat.S_ISDIR(mode):
        return "is a directory; give a path to a file"
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # writing may block without a reader
        return "is a pipe or a socket; give a path to a file"
    if not os.access(target, os.W_OK):
        return "no permission to write this file; give another path"
    return ""


def _folder_problem(folder: Path) -> str:
    if not folder.is_dir():
        return f"the folder {folder} does not exist; create it first"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write into {folder}; give another path"
    return ""


def write_file(report: str | Mapping[str, Any], path: Path) -> None:
    """Write a text, or a record as JSON, to `path` in UTF-8. Raises UsageError if that fails."""
    try:
        if not isinstance(report, str):
            report = f"{escaping.dump_json(report, indent=2)}\n"
        path.write_text(report, encoding="utf-8")
    except OSError as error:
        problem = f"can't be written ({error.strerror}); give another path"
        raise UsageError(f"report file {path}: {problem}") from error
