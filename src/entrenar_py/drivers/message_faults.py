"""Faults that befall a worker or a message on purpose: the same in virtual and in real time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Message


class Fate(StrEnum):
    """The fates of a message on its way."""

    KILL = "kill"  # the worker dies: half of what it sends has left, none of what it gets arrives
    CUT = "cut"  # the connection breaks in the middle of it, and both ends hear of it
    HALF_OPEN = "half_open"  # nothing more passes, and nobody is told
    FREEZE = "freeze"  # the worker stops for `seconds`
    DELAY = "delay"  # it takes `seconds` longer, and so does all that follows
    DUPLICATE = "duplicate"  # it comes twice
    REORDER = "reorder"  # it comes after the next one
    TRUNCATE = "truncate"  # its second half is lost, what follows is not
    FLIP = "flip"  # one bit of it is another


@dataclass(frozen=True, slots=True)
class Meddling:
    """The fate of one message; None is none."""

    fate: Fate | None
    seconds: float = 0.0


# (rank or None before it has one, whether it goes to the coordinator, message) -> what befalls it
Meddle = Callable[[int | None, bool, Message], Meddling | None]


# A message and what it carries; and what a worker says for it.
Said: TypeAlias = tuple[Message, Buffer]
Speak = Callable[[Message, Buffer], Iterable[Said]]


def truthfully(message: Message, payload: Buffer) -> list[Said]:
    """Just that."""
    return [(message, payload)]


def unmeddled(rank: int | None, up: bool, message: Message) -> None:
    """Nothing befalls anything."""


def bent(meddling: Meddling, data: bytes, rng: random.Random) -> bytes:
    """Return what is sent for `data`: other bytes for fates that change them, else `data`."""
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
