"""What is wrong with a contract, and where: collected first, raised once.

Decides nothing: the readers and the rules say what is an error and what is a warning.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from entrenar_py.errors import ContractError

MESSAGE_CHARS_MAX = 500


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

    def error(self, at: Position, message: str) -> None:
        """Records that the contract is invalid."""
        self._errors.append((at, message))

    def warn(self, at: Position, message: str) -> None:
        """Records what a strict reader would not accept."""
        self._warnings.append((at, message))

    def settle(self, *, strict: bool) -> tuple[str, ...]:
        """The warnings as lines `file:line:column: message`, in the order of the file.

        Raises ContractError with every error, and under `strict` with every warning too.
        """
        errors = self._errors + (self._warnings if strict else [])
        if errors:
            raise ContractError(_lines(errors))
        return tuple(_lines(self._warnings))


def _lines(found: list[tuple[Position, str]]) -> list[str]:
    return list(dict.fromkeys(f"{at}: {_one_line(message)}" for at, message in sorted(found)))


def _one_line(message: str) -> str:
    """A message quotes the file: no line break, terminal escape or page of text may come out."""
    printable = "".join(char if char.isprintable() else " " for char in message)
    return textwrap.shorten(printable, MESSAGE_CHARS_MAX)
