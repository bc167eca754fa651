"""The protocol over TCP: the same machines on asyncio streams of bytes.

A payload is read into its own memory and written from it, a chunk at a time as the connection takes
them, so that nothing is held twice.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from entrenar_py.drivers.ends import CoordinatorEnd, MemberHands, ServerHands, WorkerEnd
from entrenar_py.drivers.meddling import (
    Fate,
    Meddle,
    Meddling,
    Speak,
    bent,
    truthfully,
    unmeddled,
)
from entrenar_py.protocol import effects as do
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.effects import Peer
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.handshake import NONCE_BYTES
from entrenar_py.protocol.messages import Message, NonFinite, TreeNode
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.protocol.worker import Worker

BACKOFF_S = (0.05, 2.0)
TICKS_A_HEARTBEAT = 4
BACKLOG = 2**10  # connections not taken up yet: a burst of strangers must not keep a worker out
FAREWELL_S = 2.0  # how long the last messages may take


class Link(asyncio.BufferedProtocol):
    """One connection: reads into `buffer()`, writes what is queued as fast as it is taken."""

    def __init__(
        self,
        opened: Callable[[Link], None],
        buffer: Callable[[Link], memoryview | None],
        filled: Callable[[Link, int], None],
        lost: Callable[[Link, str], None],
    ) -> None:
        self._opened, self._buffer, self._filled, self._lost = opened, buffer, filled, lost
        self._transport: asyncio.Transport | None = None
        self._queue: deque[Iterator[Buffer]] = deque()
        self._paused = self._closing = self._mute = False
        self._held = b""
        self._farewell: asyncio.TimerHandle | None = None
        self._waste = bytearray(2**16)  # for what comes when nobody listens any more
        self.ended = asyncio.get_running_loop().create_future()

    def write(self, buffers: Iterable[Buffer], befalls: Meddling | None = None) -> None:
        """Queues `buffers`, in order; they are asked for when they can be sent.

        `befalls` is what happens to them on purpose: to the bytes or the connection, not to the
        process, which is its driver's affair.
        """
        if befalls is None and not self._held:
            self._queue.append(iter(buffers))
        else:
            self._bend(b"".join(buffers), befalls or Meddling(None))
        self._pump()

    def _bend(self, data: bytes, befalls: Meddling) -> None:
        half = data[: len(data) // 2]
        match befalls.fate:
            case Fate.REORDER:
                self._held += data
                return
            case Fate.HALF_OPEN:
                self._mute = True
                if self._transport is not None:
                    self._transport.pause_reading()
            case Fate.CUT | Fate.KILL:
                self._queue.append(iter([half]))
                self._pump()
                self._mute = True
                if self._transport is not None and befalls.fate is Fate.CUT:
                    self._transport.abort()
                return
            case Fate.DELAY:
                self._paused = True
                asyncio.get_running_loop().call_later(befalls.seconds, self.resume_writing)
        self._queue.append(iter([bent(befalls, data, random.Random(len(data))) + self._held]))
        self._held = b""

    def close(self) -> None:
        """Ends the connection once all is sent and heard; after FAREWELL_S in any case."""
        self._closing = True
        self._pump()
        if self._transport is not None:
            loop = asyncio.get_running_loop()
            self._farewell = loop.call_later(FAREWELL_S, self._transport.abort)

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        return self._waste if (place := self._buffer(self)) is None else place

    def buffer_updated(self, nbytes: int) -> None:
        if self._buffer(self) is not None:
            self._filled(self, nbytes)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._queue.clear()
        self._transport = None
        if self._farewell is not None:
            self._farewell.cancel()  # it would keep this connection alive
        self._lost(self, str(exc or "closed by the other end"))
        if not self.ended.done():
            self.ended.set_result(None)

    def _pump(self) -> None:
        while self._queue and self._transport is not None and not self._paused:
            piece = next(self._queue[0], None)
            if piece is None:
                self._queue.popleft()
            elif not self._mute:
                self._transport.write(piece)
        if self._closing and not self._queue and self._transport is not None:
            self._closing = False
            # Not closed at once: with bytes unread that would reset the connection, and what was
            # said last could be lost. The other end closes when it has read it.
            self._transport.write_eof()


class CoordinatorServer:
    """The coordinator of one run, listening."""

    def __init__(
        self,
        run: Run,
        hands: ServerHands,
        *,
        timing: Timing,
        secret: bytes,
        meddle: Meddle = unmeddled,
    ) -> None:
        machine = Coordinator(run, secret=secret, timing=timing, now=time.monotonic())
        self.end = CoordinatorEnd(machine, hands, self, time.monotonic)
        self._tick_s = timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._meddle = meddle
        self._numbers = count()
        self._links: dict[Peer, Link] = {}
        self._peers: dict[Link, int] = {}
        self._finished: asyncio.Future[do.Finish] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listens at `host`, at a free port if `port` is 0; the address that it has then."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._link, host, port, backlog=BACKLOG)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def finish(self) -> do.Finish:
        """The Finish of the run, when all that was said last is sent.

        Raises what the hands or the machine raise, wherever that was.
        """
        assert self._server is not None, "listen comes first"
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            finish = await self._finished
            self._server.close()
            leaving = [link.ended for link in self._peers]
            if leaving:
                await asyncio.wait(leaving, timeout=FAREWELL_S)
            return finish
        finally:
            self._ticking.cancel()
            self._server.close()
            for link in self._peers:
                link.abort()

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Sends a message."""
        member = self.end.machine.peers.get(peer)
        rank = None if member is None else member.rank
        self._links[peer].write(buffers, self._meddle(rank, False, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Ends a connection."""
        self._links.pop(peer).close()

    def _link(self) -> Link:
        return Link(self._opened, self._buffer, self._filled, self._lost)

    def _opened(self, link: Link) -> None:
        peer = next(self._numbers)
        self._links[peer], self._peers[link] = link, peer
        self.end.connected(peer, secrets.token_hex(NONCE_BYTES))
        self._look()

    def _buffer(self, link: Link) -> memoryview | None:
        return self.end.buffer(self._peers[link])

    def _filled(self, link: Link, num_bytes: int) -> None:
        self.end.filled(self._peers[link], num_bytes)
        self._look()

    def _lost(self, link: Link, reason: str) -> None:
        self.end.lost(self._peers.pop(link), reason)
        self._look()

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self.end.tick()
        self._look()

    def _look(self) -> None:
        if self.end.finished is not None and not self._finished.done():
            self._finished.set_result(self.end.finished)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something here raised: no run goes on after that."""
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])


class WorkerClient:
    """A worker that connects to a coordinator, and again when the connection is lost."""

    def __init__(
        self,
        machine: Worker,
        hands: MemberHands,
        *,
        meddle: Meddle = unmeddled,
        speak: Speak = truthfully,
    ) -> None:
        self.end = WorkerEnd(machine, hands, self, time.monotonic, self._compute, speak)
        self._meddle = meddle
        self._link: Link | None = None
        self._reason = ""  # why the last connection ended
        self._error: BaseException | None = None
        self._computing: asyncio.Future[list[TreeNode] | NonFinite] | None = None
        self._thread = ThreadPoolExecutor(1)

    async def run(self, host: str, port: int, *, patience_s: float) -> do.Finish:
        """Takes part until the run is over; `failed` after `patience_s` without being let in.

        Raises what the hands or the machine raise, wherever that was.
        """
        since = time.monotonic()
        wait_s = BACKOFF_S[0]
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            while self.end.finished is None:
                if self._computing is not None:  # of a stay that is over: it still uses the replica
                    await asyncio.wait([self._computing])
                problem = await self._stay(host, port)
                if self._error is not None:
                    raise self._error
                if problem is None:
                    since, wait_s = time.monotonic(), BACKOFF_S[0]
                elif time.monotonic() - since > patience_s:
                    return do.Finish("failed", f"no coordinator at {host}:{port}: {problem}")
                if self.end.finished is None:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, BACKOFF_S[1])
        finally:
            self._ticking.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)
        return self.end.finished

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Sends a message."""
        if self._link is not None:
            self._link.write(buffers, self._meddle(self.end.machine.rank, True, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Ends the connection."""
        self._reason = reason
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _stay(self, host: str, port: int) -> str | None:
        """One connection, to its end; why this worker was not let in, if it was not."""
        loop = asyncio.get_running_loop()
        stays, patience_s = self.end.num_stays, self.end.machine.timing.hello_s
        try:
            # A network that swallows packets says nothing; left alone the kernel asks for minutes.
            async with asyncio.timeout(patience_s):
                _, link = await loop.create_connection(self._new_link, host, port)
        except OSError as error:
            return str(error) or f"nobody answered within {patience_s} s"
        try:
            await link.ended
        finally:
            link.abort()
        return self._reason if self.end.num_stays == stays else None

    def _new_link(self) -> Link:
        return Link(self._opened, self._buffer, self._filled, self._lost)

    def _opened(self, link: Link) -> None:
        self._link = link
        self.end.connected(link, secrets.token_hex(NONCE_BYTES))

    def _buffer(self, link: Link) -> memoryview | None:
        return self.end.buffer() if link is self._link else None

    def _filled(self, link: Link, num_bytes: int) -> None:
        self.end.filled(num_bytes)

    def _lost(self, link: Link, reason: str) -> None:
        if link is self._link:
            self._link = None
            self.end.lost(reason)

    def _compute(self, asked: do.Compute) -> None:
        work: Callable[[int, tuple[int, ...]], list[TreeNode] | NonFinite] = self.end.hands.work

        def computed(outcome: asyncio.Future[list[TreeNode] | NonFinite]) -> None:
            self._computing = None
            if not outcome.cancelled():  # as it is when the run is over
                self.end.computed(asked, outcome.result())

        loop = asyncio.get_running_loop()
        self._computing = loop.run_in_executor(self._thread, work, asked.step, asked.shards)
        self._computing.add_done_callback(computed)

    def _tick(self) -> None:
        tick_s = self.end.machine.timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._ticking = asyncio.get_running_loop().call_later(tick_s, self._tick)
        self.end.tick()

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something here raised: this worker does not go on after that."""
        loop.default_exception_handler(context)
        self._error = self._error or context.get("exception")
        if self._link is not None:
            self._link.abort()
