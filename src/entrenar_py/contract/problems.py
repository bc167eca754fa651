"""The problems of a contract, with their places: collected first, told or raised once.

Three levels. An error makes the contract invalid. A warning is an error under `--strict`. A note
says what was made of something that is right as it is, and is never an error. Decides nothing: the
readers and the rules choose the level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from entrenar_py.errors import ContractError, did_you_mean
from entrenar_py.untrusted import escaping

MESSAGE_CHARS_MAX = 500
# Names compared in search of the nearest: a file of thousands of unknown names gets no more hints.
COMPARISONS_MAX = 20_000
# A key of up to so many characters that is so like a known one (difflib's ratio) is a slip of it.
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
    """One thing to say about a place; `message` may quote the file, `line` is fit to print.

    `rule` is the id of the rule that it breaks ("" if it breaks none that has one).
    """

    at: Position
    level: Level
    message: str
    rule: str = ""

    @property
    def line(self) -> str:
        """`file:line:column: level: message`, as compilers have it; one printable line."""
        message = escaping.shortened(escaping.line(self.message), chars_max=MESSAGE_CHARS_MAX)
        return f"{escaping.line(self.at)}: {self.level}: {message}"


class Problems:
    """Everything met so far."""

    def __init__(self) -> None:
        self._found: list[Problem] = []
        self._unread: dict[str, tuple[Position, Counter[str]]] = {}
        self._listed: set[tuple[str, ...]] = set()
        self._comparisons_left = COMPARISONS_MAX

    def error(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record that the contract is invalid."""
        self._found.append(Problem(at, "error", message, rule))

    def warn(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record what a strict reader would not accept."""
        self._found.append(Problem(at, "warning", message, rule))

    def note(self, at: Position, message: str, *, rule: str = "") -> None:
        """Record what was made of something that even a strict reader accepts."""
        self._found.append(Problem(at, "note", message, rule))

    def unread(self, at: Position, kind: str, key: str) -> None:
        """Record a key that nothing reads: one note for all keys of a `kind` of mapping."""
        _, keys = self._unread.setdefault(kind, (at, Counter()))
        keys[key] += 1

    def is_near(self, given: str, known: Collection[str]) -> bool:
        """Return whether a name that is not `known` looks like a slip of one that is."""
        if len(known) > self._comparisons_left:
            return False
        self._comparisons_left -= len(known)
        return len(given) <= SLIP_CHARS_MAX and bool(get_close_matches(given, known, 1, SLIP))

    def hint(self, given: str, known: Collection[str], *, otherwise: str | None = None) -> str:
        """Return the hint on a name that is not `known`: `; did you mean 'x'?`, or `otherwise`.

        Without that it is a list of them, but once a file; later "".
        """
        names = tuple(known)
        near = self._near(given, names)
        if near or otherwise is not None:
            return f"; {near or otherwise}"
        if names in self._listed:
            return ""
        self._listed.add(names)
        return f"; known are {', '.join(names)}"

    @property
    def all(self) -> tuple[Problem, ...]:
        """Errors, warnings and notes, in the order of the file, each once."""
        return tuple(dict.fromkeys(sorted([*self._found, *self._notes_on_keys()])))

    def settle(self, *, strict: bool) -> tuple[Problem, ...]:
        """Return the warnings and notes, in the order of the file, each once.

        Raises ContractError with every error (`file:line:column: error: ...`), and under `strict`
        with every warning too, each an error then.
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

    def _near(self, given: str, names: tuple[str, ...]) -> str:
        if len(names) > self._comparisons_left:
            return ""
        self._comparisons_left -= len(names)
        return did_you_mean(given, names, otherwise="")
