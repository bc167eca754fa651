"""Asks questions on a terminal or a pipe: each has a default, and answers are checked at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO, TypeVar

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping, printing

T = TypeVar("T")
CHARS_MAX = 10_000  # of an answer


class Questions:
    """Asks by `say`, and reads an answer a line from `answers`. An empty line is the default."""

    def __init__(self, answers: TextIO, say: Callable[[str], None] = printing.say_lines) -> None:
        self._answers, self._say = answers, say

    def ask(self, question: str, default: str, read: Callable[[str], T]) -> T:
        """Return what `read` makes of the answer.

        If `read` raises UsageError, its message is shown and the question asked again. Raises
        UsageError at the end of the input.
        """
        while True:
            self._say(f"{question} [{default}]")
            line = self._answers.readline(CHARS_MAX)
            if not line:
                raise UsageError(
                    f"the input ended before an answer to {question!r}; nothing was written"
                )
            answer = escaping.text(line.strip()) or default
            try:
                return read(answer)
            except UsageError as error:
                self._say(f"  {escaping.line(error)}")


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return a reader that takes one of `choices`."""

    def read(answer: str) -> str:
        if answer not in choices:
            raise UsageError(f"{answer!r}: use {' or '.join(choices)}")
        return answer

    return read


def number(least: int, most: int) -> Callable[[str], int]:
    """Return a reader that takes a whole number from `least` to `most`."""

    def read(answer: str) -> int:
        if not (answer.isascii() and answer.isdigit() and least <= int(answer[:9]) <= most):
            raise UsageError(f"{answer!r}: use a whole number from {least} to {most}")
        return int(answer)

    return read


def names(least: int) -> Callable[[str], tuple[str, ...]]:
    """Return a reader that takes `least` names or more, with commas between them, each once."""

    def read(answer: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in answer.split(",") if name.strip())
        if len(found) < least:
            raise UsageError(f"{answer!r}: use {least} names or more, with commas between them")
        if len(set(found)) < len(found):
            raise UsageError(f"{answer!r}: a name is there twice; name each once")
        return found

    return read
