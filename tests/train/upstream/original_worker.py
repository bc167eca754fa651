"""A worker of the original system: a blocking socket, and the bytes of the description alone."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from entrenar_py.train.upstream.server import AveragingServer
from entrenar_py.train.upstream.terms import Patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from tests.train.upstream import original as send
from tests.train.upstream.averaging import run_of

TIMEOUT_S = 20.0


class OriginalWorker:
    """One connection. `worker` is its id, once it was accepted."""

    def __init__(self, port: int, node: str = "node", *, joins: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.worker = -1
        if joins:
            self.say(send.join(node))
            tag, self.worker, self.total = self.hear()
            assert tag == 2

    def say(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def hear(self) -> tuple[Any, ...]:
        """Return the next message; EOFError if the connection has ended."""
        return send.parsed(self.hear_bytes())

    def hear_bytes(self) -> bytes:
        return send.body(self._read)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise EOFError(f"{len(data)} of {size} bytes came")
            data += piece
        return bytes(data)

    def is_closed(self) -> bool:
        """Wait for the end of the connection; False if something comes instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def train(self, gradient: Any, *, steps: int | None = None) -> list[tuple[Any, ...]]:
        """Deliver `gradient(step, start, end)` for each shard, until the end or `steps` averages.

        Return the averages. At the end the connection is closed.
        """
        averages: list[tuple[Any, ...]] = []
        while steps is None or len(averages) < steps:
            tag, *fields = self.hear()
            if tag == 7:
                self.close()
                break
            if tag == 3:
                step, start, end = fields
                values = gradient(step, start, end)
                self.say(send.gradient(step, self.worker, values, total=end - start))
            else:
                assert tag == 5
                averages.append(tuple(fields))
        return averages


def mean_of_samples(step: int, start: int, end: int) -> Sequence[float]:
    """Return a gradient that depends on step and samples, and on no worker."""
    ids = np.arange(start, end, dtype=np.float64)
    return [float(np.mean(np.sin(ids + step))), float(np.mean(ids)), -0.0]


class Hall:
    """A coordinator on loopback, in a thread of its own."""

    def __init__(self, **changes: Any) -> None:
        self.effects: list[Effect] = []
        self.port = 0
        self.finish: do.Finish | None = None
        self.error: BaseException | None = None
        self._workers: list[OriginalWorker] = []
        self.strangers: tuple[int, list[tuple[str, str]]] = (0, [])
        self._patience = Patience(
            **{name: changes.pop(name) for name in Patience.__dataclass_fields__ if name in changes}
        )
        self._frame_bytes_max = changes.pop("frame_bytes_max", 2**26)
        self._run = run_of(**{"gradient_bytes_max": self._frame_bytes_max, **changes})
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        try:
            server = AveragingServer(
                self._run,
                patience=self._patience,
                frame_bytes_max=self._frame_bytes_max,
                notify=self.effects.append,
            )
            self._loop, self.server = asyncio.get_running_loop(), server
            _, self.port = await server.listen("127.0.0.1", 0, insecure=False)
            self._listens.set()
            self.finish = await server.finish()
            self.strangers = server.strangers
        except BaseException as error:  # noqa: BLE001  (the test raises it)
            self.error = error
            self._listens.set()

    def start(self) -> None:
        self._thread.start()
        assert self._listens.wait(TIMEOUT_S)

    def end(self) -> do.Finish:
        """Wait for the end of the run."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the run has not ended"
        if self.error is not None:
            raise self.error
        assert self.finish is not None
        return self.finish

    def worker(self, node: str = "node", *, joins: bool = True) -> OriginalWorker:
        """Return a new connection, which ends with this coordinator."""
        self._workers.append(OriginalWorker(self.port, node, joins=joins))
        return self._workers[-1]

    def stop(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self.server.stop("the test", at_once=True))
            self._thread.join(TIMEOUT_S)


@contextmanager
def hall(**changes: Any) -> Iterator[Hall]:
    """Yield a coordinator that listens, and end it."""
    found = Hall(**changes)
    found.start()
    try:
        yield found
    finally:
        found.stop()
