"""The problems of a contract with their places, reported or raised all at once.

An error makes the contract invalid. A warning becomes an error with `--strict`. A note says how
something valid was read, and is never an error. The readers and the rules choose the level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from entrenar_py.shared.errors import ContractError, did_you_mean
from entrenar_py.shared.untrusted import escaping

MESSAGE_CHARS_MAX = 500
# The most comparisons with known names per file. After these, unknown names get no more hints.
COMPARISONS_MAX = 20_000
# An unknown name is a misspelling if it has at most this length, and at least this difflib ratio to
# a known name.
SLIP_CHARS_MAX, SLIP = 64, 0.8

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A place in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """A message about a place in a file. `message` may quote the file; `line` is safe to print.

    `rule` is the id of the broken rule, or "" for a problem that belongs to no rule.
    """

    at: Position
    level: Level
    message: str
    rule: str = ""

    @property
    def line(self) -> str:
        """The problem on one printable line, `file:line:column: level: message`."""
        message = escaping.shortened(escaping.line(self.message), chars_max=MESSAGE_CHARS_MAX)
        return f"{escaping.line(self.at)}: {self.level}: {message}"


class Problems:
    """The problems recorded so far."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._unread: dict[str, tuple[Position, Counter[str]]] = {}
        self._listed: set[tuple[str, ...]] = set()
        self._comparisons_left = COMPARISONS_MAX

    def error(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record an error: the contract is invalid."""
        self._found.append(Problem(at, "error", message, rule))

    def warn(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record a warning: with `--strict` the contract is invalid."""
        self._found.append(Problem(at, "warning", message, rule))

    def note(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record a note on how something valid was read."""
        self._found.append(Problem(at, "note", message, rule))

    def unread(self, at: Position, kind: str, key: str) -> None:
        """Record a key that no reader knows; mappings of one `kind` share a note on such keys."""
        _, keys = self._unread.setdefault(kind, (at, Counter()))
        keys[key] += 1

    def is_near(self, name: str, known: Collection[str]) -> bool:
        """Return whether the unknown `name` looks like a misspelling of a name in `known`."""
        if len(known) > self._comparisons_left:
            return False
        self._comparisons_left -= len(known)
        return len(name) <= SLIP_CHARS_MAX and bool(get_close_matches(name, known, 1, SLIP))

    def hint(self, name: str, known: Collection[str], *, otherwise: str | None = None) -> str:
        """Return the end of a message about an unknown name: `; did you mean 'x'?`, or `otherwise`.

        If `otherwise` is None, the end lists the known names, once per file, and is "" afterwards.
        """
        names = tuple(known)
        near = self._near(name, names)
        if near or otherwise is not None:
            return f"; {near or otherwise}"
        if names in self._listed:
            return ""
        self._listed.add(names)
        return f"; known are {', '.join(names)}"

    @property
    def all(self) -> tuple[Problem, ...]:
        """All errors, warnings and notes in the order of the file, without duplicates."""
        return tuple(dict.fromkeys(sorted([*self._found, *self._notes_on_keys()])))

    def settle(self, *, strict: bool) -> tuple[Problem, ...]:
        """Return the warnings and notes in the order of the file, without duplicates.

        Raises ContractError with all errors (`file:line:column: error: ...`). With `strict`,
        warnings are raised as errors, too.
        """
        levels = ("error", "warning") if strict else ("error",)
        errors = [
            Problem(problem.at, "error", problem.message, problem.rule)
            for problem in self._found
            if problem.level in levels
        ]
        if errors:
            raise ContractError(list(dict.fromkeys(problem.line for problem in sorted(errors))))
        return self.all

    def _notes_on_keys(self) -> list[Problem]:
        notes = []
        for kind, (at, keys) in self._unread.items():
            named = ", ".join(f"{key} ({num})" if num > 1 else key for key, num in keys.items())
            notes.append(Problem(at, "note", f"{kind}: not read, but kept as data: {named}"))
        return notes

    def _near(self, name: str, names: tuple[str, ...]) -> str:
        if len(names) > self._comparisons_left:
            return ""
        self._comparisons_left -= len(names)
        return did_you_mean(name, names, otherwise="")
