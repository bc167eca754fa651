"""A client that connects to a coordinator once, sends some bytes, and reads until disconnected.

It is no worker: it takes no part even if it is admitted, but it records that it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Decoder
from entrenar_py.train.wire.messages import Challenge, Message, Refuse

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
