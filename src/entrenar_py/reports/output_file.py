"""Files that a report goes to: checked before a run of minutes, written after it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from entrenar_py.errors import UsageError


def require_writable(path: Path, option: str) -> None:
    """Returns if a file can be written at `path`; creates, truncates and opens nothing.

    `option` is what the path was given to (`--json`). Raises UsageError for a directory, a folder
    that does not exist or is none, a pipe, a socket, and missing permission.
    """
    target = Path(os.path.realpath(path))  # a link is judged by what it points to
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        _require_folder(target.parent, f"{option} {path}")
        return
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}; give a path to a file") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{option} {path}: is a directory; give a path to a file")
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):  # nobody may ever read it
        raise UsageError(f"{option} {path}: is a pipe or a socket; give a path to a file")
    if not os.access(target, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write this file; give another path")


def write(text: str, path: Path) -> None:
    """Writes `text` to `path` as UTF-8; UsageError, with the system's words, if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"report file {path}: can't be written ({error.strerror})") from error


def _require_folder(folder: Path, given: str) -> None:
    if not folder.is_dir():
        raise UsageError(f"{given}: the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{given}: no permission to write into {folder}; give another path")
