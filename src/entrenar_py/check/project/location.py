"""Find a project's configuration: from the current folder upwards, up to the project's root.

Imports nothing heavy, so that a call without a configuration costs only a few system calls.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files

OWN, SHARED = "entrenar-check.toml", "pyproject.toml"
TABLE = "entrenar-check"
BYTES_MAX = 2**20
ROOT_MARKS = (".git", ".hg", ".svn", ".jj")  # above such a folder another project begins


def find(start: Path) -> Path | None:
    """Return the configuration that applies in the folder `start`, or None if there is none.

    That is the first entrenar-check.toml, or pyproject.toml with a table for this command, in
    `start` or a folder above it, up to the root of a repository. Raises UsageError if a folder has
    both, and if another user owns a file above `start`: it can name a command to run.
    """
    for folder in (start, *start.parents):
        paths = [path for path in (folder / OWN, folder / SHARED) if _counts(path)]
        if len(paths) == 2:
            raise UsageError(
                f"{paths[0]} and {paths[1]} both configure entrenar-check; keep one of them, or "
                "say which: --config FILE"
            )
        if paths:
            _require_own(paths[0], start)
            return paths[0]
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return None
    return None


def read(path: Path) -> str:
    """Return a configuration's text; raises UsageError if it can't be read or is not UTF-8."""
    try:
        with files.open_file(path, bytes_max=BYTES_MAX) as file:
            return file.read(BYTES_MAX).decode("utf-8")
    except OSError as error:
        why = f"can't be read ({error.strerror}); check that you may read it"
        raise UsageError(f"configuration {path}: {why}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"configuration {path}: not UTF-8 text; save it as UTF-8") from error


def parse(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raises ValueError, ending with the place, if invalid."""
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

    A pyproject.toml that can't be read is ignored. If it is not valid TOML but contains this
    command's name, it counts, so that reading it reports the error. For the same reason an
    entrenar-check.toml counts even if it is a pipe, a folder or a link to itself.
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
            "to run; give --config FILE if you trust it, or --no-config to ignore it"
        )
