"""A worker of a mesh over TCP: other workers connect to it, and it connects to others.

Others reach a worker at the local address of its connection to the coordinator. Over TLS it is a
server there, and its certificate must name that address.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.terms import NONCE_BYTES
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.background_thread import Thread
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.endpoints import Notify, unnoticed
from entrenar_py.train.wire_io.hands import MemberHands
from entrenar_py.train.wire_io.link import Link
from entrenar_py.train.wire_io.mesh_end import MeshEnd, MeshHands
from entrenar_py.train.wire_io.message_faults import Meddle, Speak, truthfully, unmeddled
from entrenar_py.train.wire_io.tcp import WorkerClient

_TAKEN = (errno.EADDRINUSE, errno.EACCES)
AGAIN_S = 0.05  # from being sent away to the next try


class MeshClient(WorkerClient):
    """A worker that exchanges blocks with the others directly."""

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
        """`door_context` is the TLS context for workers that connect to this one at `listen_port`
        (0: any free one). The other arguments are those of WorkerClient.
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
        """Return the end that this client drives; `machine` and `hands` are those of a mesh."""
        assert isinstance(machine, MeshWorker)
        mesh = cast(MeshHands, hands)
        clock, self._beside = time.monotonic, Thread()
        return MeshEnd(
            *(machine, mesh, self, clock, self.compute, self.dial, self._beside, speak),
            proved=self._proved,
            notify=notify,
        )

    async def run(
        self,
        host: str,
        port: int,
        *,
        patience_s: float,
        context: ssl.SSLContext | None = None,
    ) -> do.Finish:
        """Take part until the run is over; see WorkerClient.

        UsageError if only one of `context` and `door_context` is given.
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
            self._beside.close()

    def prepare(self, sock: socket.socket) -> None:
        """Listen at the local address of `sock`, which is connected to the coordinator.

        If that fails, close `sock` and raise OSError, or UsageError if `listen_port` can't be had.
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
        """Connect to another worker, in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._dial(dial))
        self._dialing.add(task)
        task.add_done_callback(self._dialed)

    def _dialed(self, task: asyncio.Task[None]) -> None:
        self._dialing.discard(task)
        if not task.cancelled():
            task.result()  # raises what it raised, for the loop's exception handler

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

        A worker with too many strangers may close the connection before it sends anything. Then
        try again, for `hello_s` in all, before the coordinator hears a complaint.
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
