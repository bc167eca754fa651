"""Injected faults of workers and messages, and a client that doesn't take part in the run."""

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
    """The faults that can happen while a message is on its way."""

    # the worker dies: half of a message that it sends has left, none of one sent to it arrives
    KILL = "kill"
    CUT = "cut"  # the connection breaks in the middle of the message, and both ends notice
    HALF_OPEN = "half_open"  # nothing more passes, and neither end notices
    FREEZE = "freeze"  # the worker stops for `seconds`
    DELAY = "delay"  # the message, and all after it, take `seconds` longer
    DUPLICATE = "duplicate"  # the message arrives twice
    REORDER = "reorder"  # the message arrives after the next one
    TRUNCATE = "truncate"  # its second half is lost; later messages are not
    FLIP = "flip"  # one of its bits is inverted


@dataclass(frozen=True, slots=True)
class Meddling:
    """The fault of one message, or None; FREEZE and DELAY last for `seconds`."""

    fate: Fate | None
    seconds: float = 0.0


# (rank, None before the Welcome; whether sent to the coordinator; message) -> its fault
Meddle = Callable[[int | None, bool, Message], Meddling | None]


# A message and its payload; and a function that returns the messages that the worker sends instead.
Said: TypeAlias = tuple[Message, Buffer]
Speak = Callable[[Message, Buffer], Iterable[Said]]


def truthfully(message: Message, payload: Buffer) -> list[Said]:
    """Return `message` and `payload` as they are."""
    return [(message, payload)]


def unmeddled(rank: int | None, up: bool, message: Message) -> None:
    """Inject no fault."""


def bent(meddling: Meddling, data: bytes, rng: random.Random) -> bytes:
    """Return the bytes to send instead of `data`; they differ if the fault changes bytes."""
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
# It never takes part in the run, even if it is admitted as a worker, but it records the admission.

CHUNK_BYTES = 2**16


class Guest:
    """One client, which answers the challenge at once, or with a byte every `pace_s` seconds.

    `let_in` says whether it was admitted as a worker; `answer` is the coordinator's answer.
    """

    def __init__(self, says: Callable[[Challenge], bytes], *, pace_s: float | None = None) -> None:
        self.let_in, self.answer = False, "no challenge"
        self.pace_s = pace_s
        self._says = says
        self._decoder = Decoder(lambda kind: 0, direction=FROM_COORDINATOR)

    def heard(self, data: bytes) -> list[bytes]:
        """Return the pieces to send in answer to the received bytes."""
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
    """Connect `guest` to the coordinator, and wait until the connection has ended."""
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
