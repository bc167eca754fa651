"""The protocol over TCP, within a process or between processes.

A payload is received into its final memory and sent from there, a chunk at a time, so nothing is in
memory twice.
"""

from __future__ import annotations

import asyncio
import errno
import math
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

from entrenar_py.shared.errors import EntrenarError, UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire.pipeline_peers import PipelineWorker
from entrenar_py.train.wire.terms import NONCE_BYTES, Run, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.endpoints import (
    CoordinatorEnd,
    MemberHands,
    Notify,
    ServerHands,
    WorkerEnd,
    unnoticed,
)
from entrenar_py.train.wire_io.injections import Meddle, Speak, truthfully, unmeddled
from entrenar_py.train.wire_io.link import FAREWELL_S, Link
from entrenar_py.train.wire_io.peer_ends import MeshEnd, MeshHands, PipelineEnd, PipelineHands
from entrenar_py.train.wire_io.processes import Thread

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
        self._background, self._reading = Thread(), Thread()
        self.end = CoordinatorEnd(
            *(machine, hands, self, time.monotonic, self._background, self._reading),
            proved=self._proved,
            notify=notify,
        )
        self._tick_s = timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._meddle = meddle
        self._visits: dict[Link, Visit] = {}
        self.bytes_in = self.bytes_out = 0  # protocol traffic with all peers
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
        """Listen at all addresses of `host`; return the first address and the port.

        Port 0 selects a free port. `context` is for TLS; None for plain TCP. `buffer_bytes` is the
        size of the kernel's buffers of a connection.

        Raises UsageError if other machines can connect and neither a long secret nor a TLS
        certificate is required of them. Raises OSError if an address is in use, or if `host` has no
        address.
        """
        addresses = await sockets.resolve(host, port)
        if not all(map(sockets.is_loopback, addresses)):
            _require_protection(host, self.end.machine.secret, context)
        listeners = sockets.listen(addresses, buffer_bytes=buffer_bytes)
        self._door = Door(
            listeners, self._opened, context=context, patience_s=self.end.machine.timing.hello_s
        )
        name = listeners[0].getsockname()
        return name[0], name[1]

    async def finish(self) -> do.Finish:
        """Return the Finish of the run, after the last messages are sent.

        Raises any exception that the arithmetic or the state machine raised during the run.
        """
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            finish = await self._finished
            self._door.close()
            # Don't wait for clients without a proof: they may never disconnect.
            leaving = [link.ended for link, visit in self._visits.items() if visit.has_proved]
            if leaving:
                flowing_s = self.end.machine.timing.dead_after_s
                await asyncio.wait(leaving, timeout=flowing_s + 2 * FAREWELL_S)
            return finish
        finally:
            self._ticking.cancel()
            self._door.close()
            for link in self._visits:
                link.abort()
            self._background.close()
            self._reading.close()

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the run when the current step is applied, or at once if `at_once`."""
        self.end.stop(reason, at_once=at_once)
        self._look()

    def die(self) -> None:
        """End at once and without messages, as if the process had died.

        `finish` then returns DIED.
        """
        self._dead = True
        self._ticking.cancel()
        self._background.forget()
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
        peer.close(flowing_s=self.end.machine.timing.dead_after_s)

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
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])


def _require_protection(host: str, secret: bytes, context: ssl.SSLContext | None) -> None:
    """Raise UsageError if anyone could take part in a run that listens at `host`."""
    if len(secret) < SECRET_BYTES_MIN and not (context and sockets.proves_identity(context)):
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
        """Start without a connection.

        `alone` is called before each new attempt with the reason why the worker isn't connected.
        `buffer_bytes` is the size of the kernel's buffers of a connection.
        """
        self._alone = alone
        self.buffer_bytes = buffer_bytes
        self.end = self.new_end(machine, hands, speak, notify)
        self._meddle = meddle
        self._link: Link | None = None
        self._reason = ""  # reason why the last connection ended
        self._error: BaseException | None = None
        self._computing: asyncio.Future[Any] | None = None
        self._leaving: asyncio.Future[None]  # once it runs
        self._thread = ThreadPoolExecutor(1)

    async def run(
        self, host: str, port: int, *, patience_s: float, context: ssl.SSLContext | None = None
    ) -> do.Finish:
        """Take part until the run is over; return `failed` after `patience_s` without a place.

        `context` is for TLS; None for plain TCP. Raises any exception that the arithmetic or the
        state machine raised during the run.
        """
        since = time.monotonic()
        wait_s = sockets.BACKOFF_S[0]
        self._leaving = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(self._broke)
        self._tick()
        try:
            while self.end.finished is None:
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
        """Return the endpoint that this client drives."""
        clock = time.monotonic
        return WorkerEnd(machine, hands, self, clock, self.compute, speak, notify=notify)

    def prepare(self, sock: socket.socket) -> None:
        """Prepare `sock`, which has just connected to the coordinator; a hook for subclasses.

        If it fails, it closes `sock` and raises OSError.
        """

    def leave(self, reason: str) -> None:
        """Leave the run for good; a connected coordinator gets the reason."""
        self.end.leave(reason)
        if not self._leaving.done():
            self._leaving.set_result(None)

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
        """Return why one connection was not admitted, after it has ended.

        The result is None if it was admitted, or could wait for that with a rank, or if this worker
        left or failed before it was connected.
        """
        stays = self._num_stays()
        if self._computing is not None:  # for the last connection, on the same replica
            ends = (self._computing, self._leaving)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._is_over():
            return None
        try:
            sock = await self.connect(host, port, context)
            self.prepare(sock)
        except TimeoutError:
            return f"no answer within {self.end.machine.timing.hello_s:g} s"
        except OSError as error:
            return str(error)
        if self._is_over():
            sock.close()
            return None
        self._link = link = Link(
            sock, buffer=self.end.buffer, filled=self.end.filled, lost=self.end.lost
        )
        self.end.connected(link, secrets.token_hex(NONCE_BYTES))
        try:
            await link.ended
        finally:
            link.abort()
        return self._reason if self._num_stays() == stays else None

    def _num_stays(self) -> int:
        """Return a number that grows when this worker is admitted, or waits for that."""
        got = self.end.meter.got
        # A coordinator sends heartbeats to a worker that waits, and none to one that it refuses.
        return self.end.num_stays + (got["Heartbeat"].messages if "Heartbeat" in got else 0)

    def _is_over(self) -> bool:
        return self.end.finished is not None or self._error is not None

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
        """Return a connection, over TLS if `context` is given; raises OSError or TimeoutError."""
        patience_s = self.end.machine.timing.hello_s
        sock = await sockets.connect(
            host, port, patience_s=patience_s, buffer_bytes=self.buffer_bytes
        )
        if context is None:
            return sock
        return await sockets.secured(
            sock, context, server_side=False, host=host, patience_s=patience_s
        )

    def compute(self, effect: Any) -> None:
        """Do the work of the effect `effect` in a thread."""

        def computed(outcome: asyncio.Future[Any]) -> None:
            if self._computing is outcome:  # and not the next one, which waits for the thread
                self._computing = None
            if not outcome.cancelled():  # as it is when the run is over
                self.end.computed(effect, outcome.result())

        loop = asyncio.get_running_loop()
        self._computing = loop.run_in_executor(self._thread, self.end.work, effect)
        self._computing.add_done_callback(computed)

    def _tick(self) -> None:
        tick_s = self.end.machine.timing.heartbeat_s / TICKS_A_HEARTBEAT
        self._ticking = asyncio.get_running_loop().call_later(tick_s, self._tick)
        self.end.tick()

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End this worker after an exception in the loop, which `run` raises again.

        The stack is printed unless the message was written for users.
        """
        if not isinstance(context.get("exception"), EntrenarError):
            loop.default_exception_handler(context)
        self._error = self._error or context.get("exception")
        if self._link is not None:
            self._link.abort()


# A worker of a mesh over TCP: other workers connect to it, and it connects to other workers.
#
# Other workers reach it at the local address of its connection to the coordinator. Over TLS it is a
# server at that address, which its certificate must name.

_TAKEN = (errno.EADDRINUSE, errno.EACCES)
AGAIN_S = 0.05  # from being sent away to the next attempt


class MeshClient(WorkerClient):
    """A worker that exchanges blocks directly with the other workers."""

    end: MeshEnd

    def __init__(
        self,
        machine: Worker,
        hands: MemberHands,
        *,
        meddle: Meddle = unmeddled,
        speak: Speak = truthfully,
        alone: Callable[[str], None] = lambda problem: None,
        notify: Notify = unnoticed,
        door_context: ssl.SSLContext | None = None,
        listen_port: int = 0,
        buffer_bytes: int = sockets.BUFFER_BYTES,
    ) -> None:
        """Start without a connection.

        `door_context` is the TLS context for workers that connect to this one at `listen_port` (0:
        any free port). The other arguments are as in WorkerClient.
        """
        super().__init__(
            *(machine, hands),
            meddle=meddle,
            speak=speak,
            alone=alone,
            notify=notify,
            buffer_bytes=buffer_bytes,
        )
        self._listen_port = listen_port
        self._door_context = door_context
        self._context: ssl.SSLContext | None = None
        self._door: Door | None = None
        self._host = ""
        self._links: dict[Link, Visit | None] = {}  # None if this worker connected
        self._dialing: set[asyncio.Task[None]] = set()

    def new_end(self, machine: Worker, hands: MemberHands, speak: Speak, notify: Notify) -> MeshEnd:
        """Return the endpoint that this client drives; `machine` and `hands` must be for a mesh."""
        assert isinstance(machine, MeshWorker)
        mesh = cast(MeshHands, hands)
        clock, self._background = time.monotonic, Thread()
        return MeshEnd(
            *(machine, mesh, self, clock, self.compute, self.dial, self._background, speak),
            proved=self._proved,
            notify=notify,
        )

    async def run(
        self, host: str, port: int, *, patience_s: float, context: ssl.SSLContext | None = None
    ) -> do.Finish:
        """Return how the run ended, after taking part in it; see WorkerClient.

        Raises UsageError if only one of `context` and `door_context` is given.
        """
        if (context is None) != (self._door_context is None):
            raise UsageError("TLS in a mesh: give each worker a certificate and its key")
        self._context = context
        try:
            return await super().run(host, port, patience_s=patience_s, context=context)
        finally:
            if self._door is not None:
                self._door.close()
            for task in self._dialing:
                task.cancel()
            for link in list(self._links):
                link.abort()
            self._background.close()

    def prepare(self, sock: socket.socket) -> None:
        """Listen at the local address of `sock`, which is connected to the coordinator.

        If that fails, closes `sock` and raises OSError, or UsageError if `listen_port` is
        unavailable.
        """
        with ExitStack() as failing:
            failing.callback(sock.close)
            host, _, *scope = sock.getsockname()
            if self._door is None or self._host != host:
                self._listen((sock.family, (host, self._listen_port, *scope)))
            failing.pop_all()

    def _listen(self, here: sockets.Address) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
        host = here[1][0]
        try:
            listeners = sockets.listen([here], buffer_bytes=self.buffer_bytes)
        except OSError as error:
            if not self._listen_port or error.errno not in _TAKEN:
                raise
            problem = f"can't listen at {host} ({error.strerror or error})"
            raise UsageError(f"port={self._listen_port}: {problem}; use another one") from error
        self._host = host
        self._door = Door(
            listeners,
            self._opened,
            context=self._door_context,
            patience_s=self.end.machine.timing.hello_s,
        )
        self.end.machine.port = listeners[0].getsockname()[1]

    def close(self, peer: Peer, reason: str) -> None:
        """Close a connection."""
        if isinstance(peer, Link) and peer in self._links:
            visit = self._links[peer]
            if visit is not None and self._door is not None:
                self._door.sent_away(visit, reason)
            peer.close()
        else:
            super().close(peer, reason)

    def dial(self, dial: do.Dial) -> None:
        """Connect to another worker, in a separate task."""
        task = asyncio.get_running_loop().create_task(self._dial(dial))
        self._dialing.add(task)
        task.add_done_callback(self._dialed)

    def _dialed(self, task: asyncio.Task[None]) -> None:
        self._dialing.discard(task)
        if not task.cancelled():
            task.result()  # raises the task's exception, for the loop's exception handler

    async def _dial(self, dial: do.Dial) -> None:
        host, _, port = dial.address.rpartition(":")
        try:
            sock = await self._reach(host.strip("[]"), int(port))
        except (OSError, OverflowError, ValueError) as error:  # the last two: not a port
            self.end.undialable(dial, str(error) or "no answer in time")
            return
        self.end.dialed(self._new_link(sock, None), dial, secrets.token_hex(NONCE_BYTES))

    async def _reach(self, host: str, port: int) -> socket.socket:
        """Return a connection on which the other worker has sent something, or raise OSError.

        A worker with too many connections without a proof may close this one before it sends
        anything. Then try again, for `hello_s` in total, before complaining to the coordinator.
        """
        patience_s = self.end.machine.timing.hello_s
        until = time.monotonic() + patience_s
        while True:
            try:
                sock = await self.connect(host, port, self._context)
                await sockets.spoken_to(sock, patience_s=patience_s)
                return sock
            except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(AGAIN_S)

    def _opened(self, sock: socket.socket, visit: Visit) -> None:
        link = self._new_link(sock, visit)
        visit.end = link.abort
        self.end.accepted(link, secrets.token_hex(NONCE_BYTES))

    def _proved(self, peer: Peer) -> None:
        visit = self._links.get(peer) if isinstance(peer, Link) else None
        if visit is not None and self._door is not None:
            self._door.proved(visit)

    def _new_link(self, sock: socket.socket, visit: Visit | None) -> Link:
        end = self.end
        link = Link(sock, buffer=end.buffer, filled=end.filled, lost=self._lost_link)
        self._links[link] = visit
        return link

    def _lost_link(self, link: Link, reason: str) -> None:
        self.end.lost(link, reason)
        visit = self._links.pop(link)
        if visit is not None and self._door is not None:
            self._door.left(visit)


class PipelineClient(MeshClient):
    """A worker that exchanges hidden states and gradients with the neighbouring stages."""

    def new_end(
        self, machine: Worker, hands: MemberHands, speak: Speak, notify: Notify
    ) -> PipelineEnd:
        """Return the endpoint that this client drives; `machine` and `hands` are for a pipeline."""
        assert isinstance(machine, PipelineWorker)
        clock, self._background = time.monotonic, Thread()
        return PipelineEnd(
            *(machine, cast(PipelineHands, hands), self, clock, self.compute, self.dial),
            *(self._background, speak),
            proved=self._proved,
            notify=notify,
        )
