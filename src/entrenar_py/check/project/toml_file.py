"""The file of a project's configuration, read with the place of each key.

The file is searched from the current folder upwards to the project's root. `tomllib` doesn't report
the places of keys, so a scanner in this module finds them. The module imports nothing heavy, so
that a call without a configuration costs only a few system calls.
"""

from __future__ import annotations

import os
import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files

OWN, SHARED = "entrenar-check.toml", "pyproject.toml"
TABLE = "entrenar-check"
BYTES_MAX = 2**20
# A folder that contains one of these is a project's root.
ROOT_MARKS = (".git", ".hg", ".svn", ".jj")


def find(start: Path) -> Path | None:
    """Return the configuration that applies in the folder `start`, or None if there is none.

    It is the first entrenar-check.toml, or pyproject.toml with a table for this command, in `start`
    or a folder above it, up to the root of a repository. Raises UsageError if a folder has both.
    Also raises UsageError if a different user owns a file above `start`, because it can name a
    command to run.
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
    """Return a configuration's text. Raises UsageError if it can't be read or is not UTF-8."""
    try:
        with files.open_file(path, bytes_max=BYTES_MAX) as file:
            return file.read(BYTES_MAX).decode("utf-8")
    except OSError as error:
        why = f"can't be read ({error.strerror}); check that you may read it"
        raise UsageError(f"configuration {path}: {why}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"configuration {path}: not UTF-8 text; save it as UTF-8") from error


def parse(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, ending with the place, if invalid."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("nested too deeply (at line 1, column 1)") from None
    except ValueError:  # Python limits the number of digits of an int
        raise ValueError("a number has too many digits (at line 1, column 1)") from None


def _counts(path: Path) -> bool:
    """Return whether `path` configures this command.

    A pyproject.toml that can't be read doesn't count. One that is not valid TOML counts if it
    contains this command's name, so that reading it reports the error. For the same reason an
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


# Keys of tables and indices of elements, from the root.
KeyPath = tuple[str | int, ...]
Place = tuple[int, int]  # line and column, both from 1

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}\r\n#]+")
_STRINGS = (
    re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""(?:""?)?', re.DOTALL),
    re.compile(r"'''(?:[^']|'(?!''))*'''(?:''?)?", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


def scan(text: str) -> Mapping[KeyPath, Place]:
    """Return key path -> (line, column), for each key and for each element of an array."""
    return _Scan(text).places


class _Scan:
    def __init__(self, text: str) -> None:
        self.places: dict[KeyPath, Place] = {}
        self._text, self._at = text, 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        # Path of an array of tables -> its number of tables so far.
        self._counts: dict[KeyPath, int] = {}
        table: KeyPath = ()
        while self._skip(_BLANK) < len(text):
            if text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        assert found is not None, "these match nothing, too"
        self._at = found.end()
        return self._at

    def _take(self, *patterns: re.Pattern[str]) -> str:
        for pattern in patterns:
            if found := pattern.match(self._text, self._at):
                self._at = found.end()
                return found[0]
        self._at += 1
        return ""

    def _mark(self, path: KeyPath, at: int) -> None:
        line = bisect_right(self._lines, at)
        self.places.setdefault(path, (line, at - self._lines[line - 1] + 1))

    def _header(self) -> KeyPath:
        many = self._text.startswith("[[", self._at)
        self._at += 2 if many else 1
        path: KeyPath = ()
        keys = self._keys()
        for number, (key, at) in enumerate(keys):
            path = (*path, key)
            self._mark(path, at)
            last = number == len(keys) - 1
            if last and many:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:  # the following keys are in the latest of these tables
                path = (*path, self._counts[path] - 1)
                self._mark(path, at)
        self._at += 2 if many else 1
        return path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for key, at in self._keys():
            path = (*path, key)
            self._mark(path, at)
        self._at += 1  # the character =
        self._skip(_SPACE)
        self._value(path)

    def _keys(self) -> list[tuple[str, int]]:
        """Return the parts of a dotted key, each with its offset in the text."""
        keys = []
        while True:
            start = self._skip(_SPACE)
            word = self._take(_BARE_KEY, *_STRINGS)
            quoted = word[:1] in ("'", '"')
            keys.append((tomllib.loads(f"key = {word}")["key"] if quoted else word, start))
            if not self._text.startswith(".", self._skip(_SPACE)):
                return keys
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at : self._at + 1]
        if opening not in ("[", "{"):
            self._take(*_STRINGS, _BARE_VALUE)
            return
        self._at += 1
        number = 0
        while (here := self._text[self._skip(_BLANK) : self._at + 1]) not in ("]", "}", ""):
            if here == ",":
                self._at += 1
            elif opening == "{":
                self._pair(path)
            else:
                self._mark((*path, number), self._at)
                self._value((*path, number))
                number += 1
        self._at += 1
