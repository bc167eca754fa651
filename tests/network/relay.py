"""A relay between a worker and its coordinator that delays or breaks connections; a script.

    relay.py HOST PORT MANNERS        prints the port at which it listens

MANNERS is a JSON list of `Manner`s, one per connection; later connections are relayed unchanged. It
ends with its standard input, and then prints the number of connections.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Manner:
    """The treatment of a connection's first `num_bytes`, of both directions together.

    They are sent in pieces of at most `piece_bytes`, each `delay_s` late and at `bytes_per_s`.
    `then` is what follows: `plain` relaying, `cut` (both ends are reset) or `half_open` (nothing
    passes).
    """

    num_bytes: float = float("inf")
    piece_bytes: int = CHUNK_BYTES
    bytes_per_s: float = float("inf")
    delay_s: float = 0.0
    then: str = "plain"


PLAIN = Manner()


class Line:
    """One connection through the relay."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._num_bytes = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def join(
        self,
        worker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        coordinator: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Relay until either end closes."""
        self._writers = [worker[1], coordinator[1]]
        try:
            await self._account(0)
            await asyncio.gather(
                self._pass(worker[0], coordinator[1]), self._pass(coordinator[0], worker[1])
            )
        except OSError:  # one end is gone: so is the other
            pass
        finally:
            for writer in self._writers:
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            for piece in _pieces(data, self._manner.piece_bytes):
                await asyncio.sleep(self._manner.delay_s + len(piece) / self._manner.bytes_per_s)
                writer.write(piece)
                await writer.drain()
                await self._account(len(piece))
        writer.write_eof()

    async def _account(self, num_bytes: int) -> None:
        """Count relayed bytes, and do what follows after the last of them."""
        self._num_bytes += num_bytes
        if self._num_bytes < self._manner.num_bytes:
            return
        if self._manner.then == "cut":
            raise ConnectionResetError
        if self._manner.then == "half_open":
            await asyncio.Event().wait()
        self._manner = PLAIN


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


async def relay(host: str, port: int, manners: list[Manner]) -> int:
    """Relay connections to `host`:`port` until standard input ends; return how many there were."""
    taken = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        manner = manners[taken] if taken < len(manners) else PLAIN
        taken += 1
        try:
            beyond = await asyncio.open_connection(host, port)
        except OSError:  # nobody is there: nor are we
            writer.transport.abort()
            return
        await Line(manner).join((reader, writer), beyond)

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    return taken


if __name__ == "__main__":
    host, port, manners = sys.argv[1:]
    told = [Manner(**manner) for manner in json.loads(manners)]
    with suppress(KeyboardInterrupt):
        print(asyncio.run(relay(host, int(port), told)))
