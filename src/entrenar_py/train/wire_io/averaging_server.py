"""The averaging coordinator as a TCP server, for workers of the original system.

The wire has no authentication: whoever can connect can take part.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.upstream.averager import Averager, WireStage
from entrenar_py.train.upstream.wire_messages import WireMessage
from entrenar_py.train.upstream.wire_terms import AveragingRun, Patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.averaging_end import AveragingEnd
from entrenar_py.train.wire_io.background_thread import Thread
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.endpoints import Notify, unnoticed
from entrenar_py.train.wire_io.link import FAREWELL_S, Link

TICKS = 20  # in the shortest timeout
TICK_S_MAX = 0.5


class AveragingServer:
    """The coordinator of one run."""

    def __init__(
        self,
        run: AveragingRun,
        *,
        patience: Patience,
        frame_bytes_max: int,
        notify: Notify = unnoticed,
    ) -> None:
        machine = Averager(run, patience=patience, now=time.monotonic())
        self._beside = Thread()
        self.end = AveragingEnd(
            *(machine, self, time.monotonic, self._beside),
            frame_bytes_max=frame_bytes_max,
            notify=notify,
        )
        shortest_s = min(getattr(patience, name) for name in patience.__dataclass_fields__)
        self._tick_s = min(shortest_s / TICKS, TICK_S_MAX)
        self._visits: dict[Link, Visit] = {}
        self.bytes_in = self.bytes_out = 0
        self._finished: asyncio.Future[do.Finish] = asyncio.get_running_loop().create_future()
        self._door: Door  # once it listens

    async def listen(self, host: str, port: int, *, insecure: bool) -> tuple[str, int]:
        """Listen at all addresses of `host`, and return the first one and its port.

        `port` 0 is any free one. UsageError if other machines can connect, and it is not said to be
        `insecure`. OSError if an address is in use, or `host` has none.
        """
        addresses = await sockets.resolve(host, port)
        if not insecure and not all(map(sockets.is_loopback, addresses)):
            raise UsageError(
                f"listen={host}:{port}: other machines can connect there, and this wire has no "
                "authentication: anyone who connects can change what is trained; listen at "
                "127.0.0.1, or say --insecure"
            )
        listeners = sockets.listen(addresses)
        self._door = Door(
            listeners, self._opened, context=None, patience_s=self.end.machine.patience.hello_s
        )
        name = listeners[0].getsockname()
        return name[0], name[1]

    async def finish(self) -> do.Finish:
        """Return the Finish of the run, once the last messages are sent.

        Raises what the end raised at any time.
        """
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            finish = await self._finished
            self._door.close()
            leaving = [link.ended for link, visit in self._visits.items() if visit.has_proved]
            if leaving:
                await asyncio.wait(leaving, timeout=self._farewell_s() + FAREWELL_S)
            return finish
        finally:
            self._ticking.cancel()
            self._door.close()
            for link in self._visits:
                link.abort()
            self._beside.close()

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run when the current step is made, or `at_once`."""
        self.end.stop(reason, at_once=at_once)
        self._look()

    # --- what the end writes ----------------------------------------------------------------------

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        """Send a message. A worker that doesn't read gets no more than the averages of two steps:
        it has a shard to deliver in every step but an epoch's last, which may have too few.
        """
        assert isinstance(peer, Link)
        peer.write(self._counted(buffers))

    def admit(self, peer: Peer) -> None:
        """Free the place of a connection that takes part."""
        assert isinstance(peer, Link)
        self._door.proved(self._visits[peer])

    def close(self, peer: Peer, reason: str) -> None:
        """Close a connection. At the end of a run the last average has time to arrive."""
        assert isinstance(peer, Link)
        visit = self._visits.get(peer)
        if visit is None:
            return  # it was lost
        self._door.sent_away(visit, reason)
        over = self.end.machine.stage is WireStage.OVER
        peer.close(patience_s=self._farewell_s() if over else FAREWELL_S)

    @property
    def strangers(self) -> tuple[int, list[tuple[str, str]]]:
        """The number of connections that ended without joining; (host, reason) of the last ones."""
        return self._door.num_ended, list(self._door.ended)

    def _farewell_s(self) -> float:
        """Return how long the last messages may take."""
        finish = self.end.finished
        stopped = finish is not None and finish.status == "stopped"
        return FAREWELL_S if stopped else self.end.machine.patience.shard_s

    # --- what the network tells -------------------------------------------------------------------

    def _opened(self, sock: socket.socket, visit: Visit) -> None:
        link = Link(sock, buffer=self.end.buffer, filled=self._filled, lost=self._lost)
        self._visits[link] = visit
        visit.end = link.abort
        self.end.connected(link, visit.host)
        self._look()

    def _filled(self, link: Link, num_bytes: int) -> None:
        self.bytes_in += num_bytes
        self.end.filled(link, num_bytes)
        self._look()

    def _counted(self, buffers: Sequence[Buffer]) -> Iterator[Buffer]:
        for buffer in buffers:
            self.bytes_out += memoryview(buffer).nbytes
            yield buffer

    def _lost(self, link: Link, reason: str) -> None:
        visit = self._visits.pop(link)
        self.end.lost(link, reason)
        self._door.left(visit)
        self._look()

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self.end.tick()
        self._look()

    def _look(self) -> None:
        if self.end.finished is not None and not self._finished.done():
            self._finished.set_result(self.end.finished)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after an exception in the loop; `finish` raises it."""
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])
