"""What is wrong with a contract, and where: collected first, raised once.

Decides nothing: the readers and the rules say what is an error and what is a warning.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import dataclass

from entrenar_py.errors import ContractError, did_you_mean

MESSAGE_CHARS_MAX = 500
# Names compared in search of the nearest: a file of thousands of unknown names gets no more hints.
COMPARISONS_MAX = 20_000


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A place in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Problems:
    """Every error and warning met so far."""

    def __init__(self) -> None:
        self._errors: list[tuple[Position, str]] = []
        self._warnings: list[tuple[Position, str]] = []
        self._listed: set[tuple[str, ...]] = set()
        self._comparisons_left = COMPARISONS_MAX

    def error(self, at: Position, message: str) -> None:
        """Records that the contract is invalid."""
        self._errors.append((at, message))

    def warn(self, at: Position, message: str) -> None:
        """Records what a strict reader would not accept."""
        self._warnings.append((at, message))

    def hint(self, given: str, known: Collection[str], *, otherwise: str | None = None) -> str:
        """What to add about a name that is not `known`: `; did you mean 'x'?`, or `otherwise`.

        Without that it is a list of them, but once a file; later "".
        """
        names = tuple(known)
        near = ""
        if len(names) <= self._comparisons_left:
            self._comparisons_left -= len(names)
            near = did_you_mean(given, names, otherwise="")
        if near or otherwise is not None:
            return f"; {near or otherwise}"
        if names in self._listed:
            return ""
        self._listed.add(names)
        return f"; known are {', '.join(names)}"

    def settle(self, *, strict: bool) -> tuple[str, ...]:
        """The warnings as lines `file:line:column: warning: ...`, in the order of the file.

        Raises ContractError with every error (`file:line:column: error: ...`), and under `strict`
        with every warning too, each an error then.
        """
        errors = self._errors + (self._warnings if strict else [])
        if errors:
            raise ContractError(_lines("error", errors))
        return tuple(_lines("warning", self._warnings))


def _lines(what: str, found: list[tuple[Position, str]]) -> list[str]:
    lines = (f"{at}: {what}: {_one_line(message)}" for at, message in sorted(found))
    return list(dict.fromkeys(lines))


def _one_line(message: str) -> str:
    """A message quotes the file: no line break, terminal escape or page of text may come out."""
    printable = "".join(char if char.isprintable() else " " for char in message)
    return textwrap.shorten(printable, MESSAGE_CHARS_MAX)
