"""Faults that are injected into a worker or a message, in virtual and in real time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message


class Fate(StrEnum):
    """The faults that a message can meet on its way."""

    KILL = "kill"  # the worker dies: half of what it sends has left, none of what it gets arrives
    CUT = "cut"  # the connection breaks in the middle of it, and both ends hear of it
    HALF_OPEN = "half_open"  # nothing more passes, and neither end hears of it
    FREEZE = "freeze"  # the worker stops for `seconds`
    DELAY = "delay"  # it takes `seconds` longer, and so does all that follows
    DUPLICATE = "duplicate"  # it comes twice
    REORDER = "reorder"  # it comes after the next one
    TRUNCATE = "truncate"  # its second half is lost, what follows is not
    FLIP = "flip"  # one bit of it is inverted


@dataclass(frozen=True, slots=True)
class Meddling:
    """The fault of one message, or None; FREEZE and DELAY last for `seconds`."""

    fate: Fate | None
    seconds: float = 0.0


# (rank or None before it has one, whether it goes to the coordinator, message) -> its fault
Meddle = Callable[[int | None, bool, Message], Meddling | None]


# A message and its payload; and a function that returns what the worker sends in place of them.
Said: TypeAlias = tuple[Message, Buffer]
Speak = Callable[[Message, Buffer], Iterable[Said]]


def truthfully(message: Message, payload: Buffer) -> list[Said]:
    """Return `message` and `payload` as they are."""
    return [(message, payload)]


def unmeddled(rank: int | None, up: bool, message: Message) -> None:
    """Inject no fault."""


def bent(meddling: Meddling, data: bytes, rng: random.Random) -> bytes:
    """Return the bytes to send in place of `data`, changed if the fault changes bytes."""
    match meddling.fate:
        case Fate.DUPLICATE:
            return data + data
        case Fate.TRUNCATE:
            return data[: len(data) // 2]
        case Fate.FLIP:
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case _:
            return data
