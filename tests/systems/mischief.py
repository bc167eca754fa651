"""Short connections of random misbehaviour to a real coordinator, many at a time.

They don't know the secret, but some replay the recorded messages of a worker.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from entrenar_py.shared.faults import Fault
from entrenar_py.systems.star import scenario_run
from entrenar_py.train.wire.terms import Terms
from entrenar_py.train.wire_io.injections import Guest
from tests.train.wire_io.misdeeds import RESETS, speeches

AT_A_TIME = 300  # more than the connections that are accepted at once
PACE_S = 0.05
STAY_S = 1.5
CHUNK_BYTES = 2**16
RECORDED_BYTES_MAX = 2**18
NOBODY = Terms(run="0" * 64, manifest="0" * 64, data="0" * 64)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Mischief:
    """Attacks at `host`:`port`, half of them over TLS if there is a `context`.

    `recorded` is a worker's traffic. `done` counts the attacks by name, `num_answered` those that
    got an answer.
    """

    host: str
    port: int
    context: ssl.SSLContext | None = None
    recorded: bytes = b""
    done: Counter[str] = field(default_factory=Counter)
    num_answered: int = 0

    async def run(self, number: int, rng: random.Random) -> None:
        """Make the given number of attacks, AT_A_TIME at once; return when all have ended."""
        kinds = list(KINDS)
        limit = asyncio.Semaphore(AT_A_TIME)

        async def one(kind: str, seed: int) -> None:
            async with limit:
                await self._visit(kind, random.Random(seed))

        drawn = [(rng.choice(kinds), rng.getrandbits(32)) for _ in range(number)]
        await asyncio.gather(*(one(*which) for which in drawn))

    async def _visit(self, kind: str, rng: random.Random) -> None:
        context = self.context if rng.random() < 0.5 else None
        self.done[kind if context is None else f"{kind}, TLS"] += 1
        with suppress(OSError):  # the connection may be closed in any way
            async with asyncio.timeout(STAY_S), self._connected(context) as streams:
                await KINDS[kind](self, streams, rng)

    @asynccontextmanager
    async def _connected(self, context: ssl.SSLContext | None) -> AsyncIterator[Streams]:
        streams = await asyncio.open_connection(self.host, self.port, ssl=context)
        try:
            yield streams
        finally:
            streams[1].transport.abort()

    async def say(self, streams: Streams, data: bytes) -> None:
        """Send `data`, and listen until the connection is closed."""
        streams[1].write(data)
        await self.listen(streams[0])

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Read until the connection is closed."""
        heard = False
        while await reader.read(CHUNK_BYTES):
            if not heard:
                heard, self.num_answered = True, self.num_answered + 1


async def _reset(_: Mischief, streams: Streams, rng: random.Random) -> None:
    """Reset the connection at once, or during what follows."""
    await asyncio.sleep(rng.choice([0, 0, 0.001, 0.02]))
    sock = streams[1].get_extra_info("socket")
    if sock is not None:  # still connected
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)


async def _half_close(here: Mischief, streams: Streams, rng: random.Random) -> None:
    streams[1].write(rng.choice(list(speeches().values()))[:200])
    with suppress(NotImplementedError):  # TLS can't be closed in one direction
        streams[1].write_eof()
    await here.listen(streams[0])


async def _drip(here: Mischief, streams: Streams, rng: random.Random) -> None:
    hello = speeches()["a hello that is none"]
    for at in range(rng.randrange(1, 20)):
        streams[1].write(hello[at : at + 1])
        await streams[1].drain()
        await asyncio.sleep(PACE_S)


async def _garbage(here: Mischief, streams: Streams, rng: random.Random) -> None:
    await here.say(streams, rng.randbytes(rng.choice([1, 47, 48, 49, 4096])))


async def _replay(here: Mischief, streams: Streams, rng: random.Random) -> None:
    await here.say(streams, here.recorded[: rng.choice([100, 300, 1000, RECORDED_BYTES_MAX])])


async def _wrong_secret(here: Mischief, streams: Streams, rng: random.Random) -> None:
    wrong = Fault(kind="stranger", step=0, value="wrong_secret")
    guest: Guest = scenario_run.stranger_of(wrong, NOBODY, rng.randbytes(16))
    for piece in guest.heard(await streams[0].read(CHUNK_BYTES)):
        await here.say(streams, piece)
    assert not guest.let_in, "nobody is let in who does not know the secret"


async def _flood(here: Mischief, streams: Streams, rng: random.Random) -> None:
    await here.say(streams, bytes(rng.choice([2**16, 2**20])))


async def _silence(here: Mischief, streams: Streams, rng: random.Random) -> None:
    await here.listen(streams[0])


KINDS: dict[str, Callable[[Mischief, Streams, random.Random], Awaitable[None]]] = {
    "reset": _reset,
    "half-close": _half_close,
    "drip": _drip,
    "garbage": _garbage,
    "replay": _replay,
    "wrong secret": _wrong_secret,
    "flood": _flood,
    "silence": _silence,
}


class Recorder:
    """A relay to `host`:`port` that keeps the first bytes sent over its first connections."""

    def __init__(self, host: str, port: int) -> None:
        self.recorded = b""
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Start listening; return the port."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop accepting connections."""
        assert self._server is not None
        self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        try:
            up = self._copy(reader, there[1], keep=True)
            await asyncio.gather(up, self._copy(there[0], writer, keep=False))
        except OSError:
            pass  # when one end has disconnected, the other is closed
        finally:
            for one in (writer, there[1]):
                one.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if keep and len(self.recorded) < RECORDED_BYTES_MAX:
                self.recorded += data
            writer.write(data)
            await writer.drain()
        writer.write_eof()
