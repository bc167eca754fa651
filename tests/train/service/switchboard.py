"""A relay in front of a coordinator, which can reset all connections at once."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK_BYTES = 2**16


class Switchboard:
    """Relays connections at `address` to the coordinator's, in a thread of its own."""

    def __init__(self, beyond: str) -> None:
        self._host, _, port = beyond.rpartition(":")
        self._port = int(port)
        self._writers: set[StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._take, self._host, 0))
        self.address = f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> int:
        """Reset all connections, and return how many workers had one."""
        done: Future[int] = Future()

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()
            done.set_result(len(self._writers) // 2)

        self._loop.call_soon_threadsafe(abort)
        return done.result()

    def close(self) -> None:
        """Stop relaying, and close all connections."""
        self._loop.call_soon_threadsafe(self._server.close)
        self.reset()
        self._do(asyncio.sleep(0.05))  # each connection's task hears of its end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody is there: nor are we
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        passing = asyncio.gather(_pass(reader, back), _pass(there, writer))
        with suppress(OSError):
            await passing
        self._writers -= both
        for one in both:
            one.transport.abort()


async def _pass(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
