"""Find the place of each key and element of a TOML text, which `tomllib` doesn't report.

The text must be one that `tomllib` has read: errors in it are not detected here.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping

# Keys of tables and indices of elements, from the root.
Path = tuple[str | int, ...]
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


def scan(text: str) -> Mapping[Path, Place]:
    """Return, by key path, the line and column of each key and of each element of an array."""
    return _Scan(text).places


class _Scan:
    def __init__(self, text: str) -> None:
        self.places: dict[Path, Place] = {}
        self._text, self._at = text, 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self._counts: dict[Path, int] = {}  # tables in an array of tables so far
        table: Path = ()
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
        """Take and return what one of `patterns` matches here; if none does, skip a character."""
        for pattern in patterns:
            if found := pattern.match(self._text, self._at):
                self._at = found.end()
                return found[0]
        self._at += 1
        return ""

    def _mark(self, path: Path, at: int) -> None:
        line = bisect_right(self._lines, at)
        self.places.setdefault(path, (line, at - self._lines[line - 1] + 1))

    def _header(self) -> Path:
        many = self._text.startswith("[[", self._at)
        self._at += 2 if many else 1
        path: Path = ()
        keys = self._keys()
        for number, (key, at) in enumerate(keys):
            path = (*path, key)
            self._mark(path, at)
            last = number == len(keys) - 1
            if last and many:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:  # what follows is in the table that was begun last
                path = (*path, self._counts[path] - 1)
                self._mark(path, at)
        self._at += 2 if many else 1
        return path

    def _pair(self, table: Path) -> None:
        path = table
        for key, at in self._keys():
            path = (*path, key)
            self._mark(path, at)
        self._at += 1  # =
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

    def _value(self, path: Path) -> None:
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
