"""Follows a machine through its table of moves: every message and phase must be allowed by it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from entrenar_py.train.wire.messages import Message

Phase = TypeVar("Phase", bound=StrEnum)


class Follower(Generic[Phase]):
    """Follows one machine. Messages that no move names are ignored. `taken` are its moves."""

    def __init__(self, moves: Sequence[tuple[Phase, type[Message], Phase]], place: Phase) -> None:
        self.places = {place}
        self.taken: set[tuple[Phase, type[Message], Phase]] = set()
        self._moves = moves
        self._named = {kind for _, kind, _ in moves}
        self._last: set[tuple[Phase, type[Message], Phase]] = set()

    def passed(self, message: Message) -> None:
        """Take a message sent or received; AssertionError if no move allows it here."""
        if type(message) in self._named:
            made = {one for one in self._moves if one[0] in self.places and one[1] is type(message)}
            assert made, f"{type(message).__name__} passed in {self.places}"
            self._confirm({before for before, _, _ in made})
            self._last, self.places = made, {after for _, _, after in made}

    def stands(self, place: Phase) -> None:
        """Take the machine's phase; AssertionError if no move led there."""
        assert place in self.places, f"in {place}, where its moves lead to {self.places}"
        self._confirm({place})
        self.places = {place}

    def _confirm(self, places: set[Phase]) -> None:
        self.taken |= {one for one in self._last if one[2] in places}
        self._last = set()
