"""The protocol over TCP: state machines connected within a process or between processes.

A payload is received into its final memory and sent from it, a chunk at a time, so nothing is held
twice.
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

from entrenar_py.shared.errors import EntrenarError, UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire.terms import NONCE_BYTES, Run, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io import sockets, tls
from entrenar_py.train.wire_io.background_thread import Thread
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.endpoints import (
    CoordinatorEnd,
    Notify,
    WorkerEnd,
    unnoticed,
)
from entrenar_py.train.wire_io.hands import MemberHands, ServerHands
from entrenar_py.train.wire_io.link import FAREWELL_S, Link
from entrenar_py.train.wire_io.message_faults import Meddle, Speak, truthfully, unmeddled

TICKS_A_HEARTBEAT = 4
SECRET_BYTES_MIN = 16
DIED = do.Finish("died")  # the Finish of a coordinator that died


class CoordinatorServer:
    """The coordinator of one run, as a TCP server."""

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
        self._beside, self._reading = Thread(), Thread()
        self.end = CoordinatorEnd(
            *(machine, hands, self, time.monotonic, self._beside, self._reading),
            proved=self._proved,
            notify=notify,
        )
        self._tick_s = timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._meddle = meddle
        self._visits: dict[Link, Visit] = {}
        self.bytes_in = self.bytes_out = 0  # of the protocol, with all peers
        self.over_s = math.inf  # when the run was over, by `time.monotonic`
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
        """Listen at all addresses of `host`, and return the first one and its port.

        `port` 0 is any free one. A `context` is for TLS. `buffer_bytes` is the size of the kernel's
        buffers of a connection.

        UsageError if other machines can connect, and neither a long secret nor a TLS certificate is
        required of them. OSError if an address is in use, or `host` has none.
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
        """Return the Finish of the run, once the last messages are sent.

        Raises what the hands or the state machine raised at any time.
        """
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            finish = await self._finished
            self._door.close()
            # Do not wait for strangers, which need not disconnect.
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
            self._reading.close()

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the run when the current step is made, or `at_once`."""
        self.end.stop(reason, at_once=at_once)
        self._look()

    def die(self) -> None:
        """End at once and without messages, as if the process had died: `finish` returns DIED."""
        self._dead = True
        self._ticking.cancel()
        self._beside.forget()
        self._reading.forget()
        self._door.close()
        for link in self._visits:
            link.abort()
        if not self._finished.done():
            self._finished.set_result(DIED)

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send a message."""
        member = self.end.machine.peers.get(peer)
        rank = None if member is None else member.rank
        assert isinstance(peer, Link)
        peer.write(self._counted(buffers), self._meddle(rank, False, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Close a connection."""
        assert isinstance(peer, Link)
        self._door.sent_away(self._visits[peer], reason)
        peer.close()

    @property
    def strangers(self) -> tuple[int, list[tuple[str, str]]]:
        """The number of connections that ended without a proof; (host, reason) of the last ones."""
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
        """End the run after an exception in the loop; `finish` raises it."""
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])


def _require_protection(host: str, secret: bytes, context: ssl.SSLContext | None) -> None:
    """Raise UsageError if anyone could take part in a run that listens at `host`."""
    if len(secret) < SECRET_BYTES_MIN and not (context and tls.proves_identity(context)):
        raise UsageError(
            f"host={host}: other machines can connect there, and the secret of {len(secret)} bytes "
            f"is too short to stop them; give one of at least {SECRET_BYTES_MIN} bytes, or TLS "
            "with a CA that signs the workers' certificates, or listen at 127.0.0.1"
        )


class WorkerClient:
    """A worker that connects to a coordinator, and reconnects when the connection is lost."""

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
        """`alone` is called before each new try with the reason why there is no connection.
        `buffer_bytes` is the size of the kernel's buffers of a connection.
        """
        self._alone = alone
        self.buffer_bytes = buffer_bytes
        self.end = self.new_end(machine, hands, speak, notify)
        self._meddle = meddle
        self._link: Link | None = None
        self._reason = ""  # why the last connection ended
        self._error: BaseException | None = None
        self._computing: asyncio.Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1)

    async def run(
        self,
        host: str,
        port: int,
        *,
        patience_s: float,
        context: ssl.SSLContext | None = None,
    ) -> do.Finish:
        """Take part until the run is over; return `failed` after `patience_s` without admission.

        A `context` is for TLS. Raises what the hands or the state machine raised at any time.
        """
        since = time.monotonic()
        wait_s = sockets.BACKOFF_S[0]
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            while self.end.finished is None:
                if self._computing is not None:  # for the last connection, on the same replica
                    await asyncio.wait([self._computing])
                problem = await self._stay(host, port, context)
                if self._error is not None:
                    raise self._error
                if problem is None:
                    since, wait_s = time.monotonic(), sockets.BACKOFF_S[0]
                elif time.monotonic() - since > patience_s:
                    return do.Finish("failed", f"not admitted at {host}:{port}: {problem}")
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
        """Return the end that this client drives."""
        clock = time.monotonic
        return WorkerEnd(machine, hands, self, clock, self.compute, speak, notify=notify)

    def prepare(self, sock: socket.socket) -> None:
        """Hook for subclasses, called with each `sock` that is connected to the coordinator. If it
        fails, it closes `sock` and raises OSError.
        """

    def leave(self, reason: str) -> None:
        """Leave for good, and tell the coordinator why if it is connected."""
        self.end.leave(reason)

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send a message."""
        assert isinstance(peer, Link)
        peer.write(buffers, self._meddle(self.end.machine.rank, True, message))

    def close(self, peer: Peer, reason: str) -> None:
        """Close the connection."""
        assert isinstance(peer, Link)
        self._reason = reason
        peer.close()

    async def _stay(self, host: str, port: int, context: ssl.SSLContext | None) -> str | None:
        """Make one connection, and wait for its end; return why there was no admission, or None."""
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
        """Return a connection, over TLS with a `context`; OSError or TimeoutError if it fails."""
        patience_s = self.end.machine.timing.hello_s
        async with asyncio.timeout(patience_s):
            sock = await sockets.connect(host, port, buffer_bytes=self.buffer_bytes)
        if context is None:
            return sock
        return await tls.secured(sock, context, server_side=False, host=host, patience_s=patience_s)

    def compute(self, asked: Any) -> None:
        """Do the work of the effect `asked` in a thread."""

        def computed(outcome: asyncio.Future[Any]) -> None:
            if self._computing is outcome:  # and not the next one, which waits for the thread
                self._computing = None
            if not outcome.cancelled():  # as it is when the run is over
                self.end.computed(asked, outcome.result())

        loop = asyncio.get_running_loop()
        self._computing = loop.run_in_executor(self._thread, self.end.work, asked)
        self._computing.add_done_callback(computed)

    def _tick(self) -> None:
        tick_s = self.end.machine.timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._ticking = asyncio.get_running_loop().call_later(tick_s, self._tick)
        self.end.tick()

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End this worker after an exception in the loop; `run` raises it.

        Its stack is printed, unless its message was written for users.
        """
        if not isinstance(context.get("exception"), EntrenarError):
            loop.default_exception_handler(context)
        self._error = self._error or context.get("exception")
        if self._link is not None:
            self._link.abort()
