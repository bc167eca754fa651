"""Injected faults of workers and messages, and a client that takes no part in the run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Buffer, Decoder
from entrenar_py.train.wire.messages import Challenge, Message, Refuse


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


# A client that connects to a coordinator once, sends some bytes, and reads until disconnected.
#
# It is no worker: it takes no part even if it is admitted, but it records that it was.

CHUNK_BYTES = 2**16


class Guest:
    """One client, which answers the challenge all at once, or with a byte every `pace_s` seconds.

    `let_in` is whether it was admitted as a worker, `answer` the coordinator's answer.
    """

    def __init__(self, says: Callable[[Challenge], bytes], *, pace_s: float | None = None) -> None:
        self.let_in, self.answer = False, "no challenge"
        self.pace_s = pace_s
        self._says = says
        self._decoder = Decoder(lambda kind: 0, direction=FROM_COORDINATOR)

    def heard(self, data: bytes) -> list[bytes]:
        """Take bytes from the coordinator; return the pieces to send in answer."""
        if self.let_in:
            return []
        try:
            reply = b"".join(self._said_to(got.message) for got in self._decoder.feed(data))
        except ProtocolError:  # a frame with a key, which only an admitted worker gets
            self.let_in, self.answer = True, "as a worker"
            return []
        if self.pace_s is None:
            return [reply] if reply else []
        return [reply[at : at + 1] for at in range(len(reply))]

    def _said_to(self, message: Message) -> bytes:
        if isinstance(message, Refuse):
            self.answer = message.reason
        if isinstance(message, Challenge):
            self.answer = "nothing"
            return self._says(message)
        return b""


async def visit(guest: Guest, host: str, port: int) -> None:
    """Connect `guest` to the coordinator; return when the connection has ended."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:  # the run is over
        return
    saying: list[asyncio.Task[None]] = []
    try:
        while data := await reader.read(CHUNK_BYTES):
            saying.append(asyncio.create_task(_say(writer, guest.heard(data), guest.pace_s or 0)))
    except OSError:
        pass  # disconnected
    finally:
        for task in saying:
            task.cancel()
        writer.transport.abort()


async def _say(writer: asyncio.StreamWriter, pieces: list[bytes], pace_s: float) -> None:
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pace_s)
