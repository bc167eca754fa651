"""The protocol over TCP: the same machines on connections of this and other processes.

A payload is read into its own memory and written from it, a chunk at a time as the connection takes
them, so that nothing is held twice.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from entrenar_py.drivers import sockets, tls
from entrenar_py.drivers.background_thread import Thread
from entrenar_py.drivers.door import Door, Visit
from entrenar_py.drivers.endpoints import (
    CoordinatorEnd,
    MemberHands,
    Notify,
    ServerHands,
    WorkerEnd,
    unnoticed,
)
from entrenar_py.drivers.link import FAREWELL_S, Link
from entrenar_py.drivers.message_faults import Meddle, Speak, truthfully, unmeddled
from entrenar_py.errors import UsageError
from entrenar_py.protocol import effects as do
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.effects import Peer
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.handshake import NONCE_BYTES
from entrenar_py.protocol.messages import Message, NonFinite, TreeNode
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.protocol.worker import Worker

TICKS_A_HEARTBEAT = 4
SECRET_BYTES_MIN = 16
DIED = do.Finish("died")  # what a coordinator says that is gone


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
        kind: type[Coordinator] = Coordinator,
        notify: Notify = unnoticed,
    ) -> None:
        machine = kind(run, secret=secret, timing=timing, now=time.monotonic())
        self._beside = Thread()
        self.end = CoordinatorEnd(
            *(machine, hands, self, time.monotonic, self._beside),
            proved=self._proved,
            notify=notify,
        )
        self._tick_s = timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._meddle = meddle
        self._visits: dict[Link, Visit] = {}
        self.bytes_in = self.bytes_out = 0  # of the protocol, whoever said them
        self.over_s = math.inf  # when the run was, by `time.monotonic`
        self._finished: asyncio.Future[do.Finish] = asyncio.get_running_loop().create_future()
        self._door: Door  # once it listens
        self._dead = False

    async def listen(
        self,
        host: str,
        port: int,
        *,
        context: ssl.SSLContext | None = None,
        buffer_bytes: int = sockets.BUFFER_BYTES,
    ) -> tuple[str, int]:
        """Listens at all addresses of `host`, at a free port if `port` is 0; the first of them.

        With `context` over TLS. `buffer_bytes` is what the kernel may hold of a connection.

        Raises UsageError where others could take part: from other machines, with no secret that
        keeps them out and no TLS that demands a certificate. OSError if an address is taken, or
        there is none.
        """
        addresses = await sockets.resolve(host, port)
        if not all(map(sockets.is_loopback, addresses)):
            _require_protection(host, self.end.machine.secret, context)
        listeners = sockets.listen(addresses, buffer_bytes=buffer_bytes)
        self._door = Door(
            listeners,
            self._opened,
            context=context,
            patience_s=self.end.machine.timing.hello_s,
        )
        name = listeners[0].getsockname()
        return name[0], name[1]

    async def finish(self) -> do.Finish:
        """The Finish of the run, when all that was said last is sent.

        Raises what the hands or the machine raise, wherever that was.
        """
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            finish = await self._finished
            self._door.close()
            # Nobody waits for a stranger, which need not go.
            leaving = [link.ended for link, visit in self._visits.items() if visit.has_proved]
            if leaving:
                await asyncio.wait(leaving, timeout=FAREWELL_S)
            return finish
        finally:
            self._ticking.cancel()
            self._door.close()
            for link in self._visits:
                link.abort()
            self._beside.close()

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Has the run end: when the step in work is made, or `at_once`."""
        self.end.stop(reason, at_once=at_once)
        self._look()

    def die(self) -> None:
        """Is gone at once, as if its process were: `finish` gives DIED, and nobody is told."""
        self._dead = True
        self._ticking.cancel()
        self._beside.forget()
        self._door.close()
        for link in self._visits:
            link.abort()
        if not self._finished.done():
            self._finished.set_result(DIED)

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Sends a message."""
        member = self.end.machine.peers.get(peer)
        rank = None if member is None else member.rank
        assert isinstance(peer, Link)
        peer.write(self._counted(buffers), self._meddle(rank, False, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Ends a connection."""
        assert isinstance(peer, Link)
        self._door.sent_away(self._visits[peer], reason)
        peer.close()

    @property
    def strangers(self) -> tuple[int, list[tuple[str, str]]]:
        """The number of connections that ended with nothing proved; from where the last of them
        came, and why each of these ended.
        """
        return self._door.num_ended, list(self._door.ended)

    def _opened(self, sock: socket.socket, visit: Visit) -> None:
        link = Link(sock, buffer=self.end.buffer, filled=self._filled, lost=self._lost)
        self._visits[link] = visit
        visit.end = link.abort
        self.end.connected(link, secrets.token_hex(NONCE_BYTES), visit.host)
        self._look()

    def _proved(self, peer: Peer) -> None:
        assert isinstance(peer, Link)
        self._door.proved(self._visits[peer])

    def _filled(self, link: Link, num_bytes: int) -> None:
        self.bytes_in += num_bytes
        self.end.filled(link, num_bytes)
        self._look()

    def _counted(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        for buffer in buffers:
            self.bytes_out += memoryview(buffer).nbytes
            yield buffer

    def _lost(self, link: Link, reason: str) -> None:
        if not self._dead:
            self.end.lost(link, reason)
            self._look()
        self._door.left(self._visits.pop(link))

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        self.end.tick()
        self._look()

    def _look(self) -> None:
        if self.end.finished is not None and not self._finished.done():
            self.over_s = time.monotonic()
            self._finished.set_result(self.end.finished)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something here raised: no run goes on after that."""
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])


def _require_protection(host: str, secret: bytes, context: ssl.SSLContext | None) -> None:
    """UsageError if anyone could take part in a run that listens at `host`."""
    if len(secret) < SECRET_BYTES_MIN and not (context and tls.proves_identity(context)):
        raise UsageError(
            f"host={host}: other machines can connect there, and the secret of {len(secret)} bytes "
            f"keeps nobody out; give one of at least {SECRET_BYTES_MIN} bytes, or TLS with a CA "
            "that the workers' certificates must be of, or listen at 127.0.0.1"
        )


class WorkerClient:
    """A worker that connects to a coordinator, and again when the connection is lost."""

    def __init__(
        self,
        machine: Worker,
        hands: MemberHands,
        *,
        meddle: Meddle = unmeddled,
        speak: Speak = truthfully,
        alone: Callable[[str], None] = lambda problem: None,
        notify: Notify = unnoticed,
        buffer_bytes: int = sockets.BUFFER_BYTES,
    ) -> None:
        """`alone` is told why there is no coordinator, each time that it tries again.
        `buffer_bytes` is what the kernel may hold of a connection.
        """
        self._alone = alone
        self.buffer_bytes = buffer_bytes
        self.end = self.new_end(machine, hands, speak, notify)
        self._meddle = meddle
        self._link: Link | None = None
        self._reason = ""  # why the last connection ended
        self._error: BaseException | None = None
        self._computing: asyncio.Future[list[TreeNode] | NonFinite] | None = None
        self._thread = ThreadPoolExecutor(1)

    async def run(
        self,
        host: str,
        port: int,
        *,
        patience_s: float,
        context: ssl.SSLContext | None = None,
    ) -> do.Finish:
        """Takes part until the run is over; `failed` after `patience_s` without being let in.

        With `context` over TLS. Raises what the hands or the machine raise, wherever that was.
        """
        since = time.monotonic()
        wait_s = sockets.BACKOFF_S[0]
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            while self.end.finished is None:
                if self._computing is not None:  # of a stay that is over: it still uses the replica
                    await asyncio.wait([self._computing])
                problem = await self._stay(host, port, context)
                if self._error is not None:
                    raise self._error
                if problem is None:
                    since, wait_s = time.monotonic(), sockets.BACKOFF_S[0]
                elif time.monotonic() - since > patience_s:
                    return do.Finish("failed", f"no coordinator at {host}:{port}: {problem}")
                if self.end.finished is None:
                    self._alone(problem or self._reason)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, sockets.BACKOFF_S[1])
        finally:
            self._ticking.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)
        return self.end.finished

    def new_end(
        self, machine: Worker, hands: MemberHands, speak: Speak, notify: Notify
    ) -> WorkerEnd:
        """Return what this client drives."""
        clock = time.monotonic
        return WorkerEnd(machine, hands, self, clock, self.compute, speak, notify=notify)

    def prepare(self, sock: socket.socket) -> None:
        """Gets ready for a stay over `sock`, which is connected to the coordinator. OSError, and
        `sock` is closed then, if it can't.
        """

    def leave(self, reason: str) -> None:
        """Goes for good, and says why to the coordinator if there is one."""
        self.end.leave(reason)

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Sends a message."""
        assert isinstance(peer, Link)
        peer.write(buffers, self._meddle(self.end.machine.rank, True, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Ends the connection."""
        assert isinstance(peer, Link)
        self._reason = reason
        peer.close()

    async def _stay(self, host: str, port: int, context: ssl.SSLContext | None) -> str | None:
        """One connection, to its end; why this worker was not let in, if it was not."""
        stays = self.end.num_stays
        try:
            sock = await self.connect(host, port, context)
            self.prepare(sock)
        except TimeoutError:
            return f"no answer within {self.end.machine.timing.hello_s:g} s"
        except OSError as error:
            return str(error)
        self._link = link = Link(
            sock, buffer=self.end.buffer, filled=self.end.filled, lost=self.end.lost
        )
        self.end.connected(link, secrets.token_hex(NONCE_BYTES))
        try:
            await link.ended
        finally:
            link.abort()
        return self._reason if self.end.num_stays == stays else None

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
        """A connection to who is there; OSError (also TimeoutError) if it can't be."""
        patience_s = self.end.machine.timing.hello_s
        async with asyncio.timeout(patience_s):
            sock = await sockets.connect(host, port, buffer_bytes=self.buffer_bytes)
        if context is None:
            return sock
        return await tls.secured(sock, context, server_side=False, host=host, patience_s=patience_s)

    def compute(self, asked: do.Compute) -> None:
        """Has it computed, beside everything else."""
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
