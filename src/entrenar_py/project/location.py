"""Finds a project's configuration: from the current folder upwards, as far as the project.

Imports nothing heavy: a command line without a configuration pays for a few calls of the system.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from entrenar_py.errors import UsageError
from entrenar_py.untrusted import files

OWN, SHARED = "entrenar-check.toml", "pyproject.toml"
TABLE = "entrenar-check"
BYTES_MAX = 2**20
ROOT_MARKS = (".git", ".hg", ".svn", ".jj")  # above such a folder another project begins


def find(start: Path) -> Path | None:
    """The configuration that counts in the folder `start`; None if there is none.

    That is the first entrenar-check.toml, or pyproject.toml with a table for this command, in
    `start` or a folder above it, up to the root of a repository. Raises UsageError where a folder
    has both, and for a file above `start` that belongs to another user: it names a command to run.
    """
    for folder in (start, *start.parents):
        found = [path for path in (folder / OWN, folder / SHARED) if _counts(path)]
        if len(found) == 2:
            raise UsageError(
                f"{found[0]} and {found[1]} both configure entrenar-check; keep one of them, or "
                "say which: --config FILE"
            )
        if found:
            _require_own(found[0], start)
            return found[0]
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return None
    return None


def read(path: Path) -> str:
    """The text of a configuration; UsageError if it is no regular file, too large or no UTF-8."""
    try:
        with files.open_file(path, bytes_max=BYTES_MAX) as file:
            return file.read(BYTES_MAX).decode("utf-8")
    except OSError as error:
        raise UsageError(f"configuration {path}: can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"configuration {path}: is no UTF-8 text ({error.reason})") from error


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError, which ends with the place, for what is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("nested too deeply (at line 1, column 1)") from None
    except ValueError:  # Python reads no number of that many digits
        raise ValueError("a number has too many digits (at line 1, column 1)") from None


def _counts(path: Path) -> bool:
    """Return whether `path` configures this command.

    A pyproject.toml that can't be read may be of no concern here; one that names this command and
    is no TOML is: reading it says what is wrong. So does reading a file of this command's own name
    that is a pipe, a folder or a link to itself.
    """
    try:
        if path.name == OWN:
            return os.path.lexists(path)
        if not path.is_file():
            return False
        if path.stat().st_size > BYTES_MAX or TABLE.encode() not in (text := path.read_bytes()):
            return False
    except OSError:
        return False
    try:
        tools = parse(text.decode("utf-8", "replace")).get("tool")
    except ValueError:
        return True
    return isinstance(tools, dict) and TABLE in tools


def _require_own(path: Path, start: Path) -> None:
    if path.parent == start or not hasattr(os, "getuid"):
        return
    owner = path.stat().st_uid
    if owner not in (0, os.getuid()):
        raise UsageError(
            f"configuration {path} belongs to another user (uid {owner}), and can name a command "
            "to run; if you trust it, say so: --config FILE. --no-config goes without"
        )
