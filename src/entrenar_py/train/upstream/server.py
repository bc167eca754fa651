"""The averaging coordinator as a TCP server, for workers of the original system.

The wire has no authentication: every peer that can connect can take part.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from blake3 import blake3

from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.train.arithmetic.reduction import Vector, first_not_finite, weighted_mean
from entrenar_py.train.upstream import terms as wire
from entrenar_py.train.upstream.averager import Averager, WireStage
from entrenar_py.train.upstream.frames import (
    FROM_WORKERS,
    SHORT_BYTES_MAX,
    UPLOADS,
    Decoder,
    JoinRequest,
    Part,
    Received,
    WireMessage,
    encode,
)
from entrenar_py.train.upstream.terms import AveragingRun, Patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.door import Door, Visit
from entrenar_py.train.wire_io.endpoints import Background, Notify, unnoticed
from entrenar_py.train.wire_io.link import FAREWELL_S, Link
from entrenar_py.train.wire_io.processes import Thread

# The averaging coordinator without the network: its state machine, codecs and gradients.
#
# A gradient is kept from its first byte until its part is averaged, an average until it is sent.


class Wire(Protocol):
    """The place to which an `AveragingEnd` writes its messages."""

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        """Send `message`, encoded in `buffers`, after all earlier messages."""
        ...

    def admit(self, peer: Peer) -> None:
        """Note that `peer` takes part."""
        ...

    def close(self, peer: Peer, reason: str) -> None:
        """Close the connection after all messages are sent; its later events are dropped."""
        ...


class Average(NamedTuple):
    """The average of a part, float32 [num_gradients].

    It has the BLAKE3 digest of its bytes, and the seconds that it took.
    """

    vector: Vector
    digest: str
    seconds: float


class AveragingEnd:
    """The endpoint of the state machine `machine`: carries out the effects that it returns.

    `finished` is its Finish effect, None until then. `frame_bytes_max` limits frames from workers.
    Averages are computed in `background`. `averages` has the averages of the current step, by part.
    """

    def __init__(
        self,
        machine: Averager,
        to: Wire,
        clock: Callable[[], float],
        background: Background,
        *,
        frame_bytes_max: int,
        notify: Notify = unnoticed,
    ) -> None:
        self.machine = machine
        self.finished: do.Finish | None = None
        self.averages: dict[Part, Average] = {}
        self._wire, self._clock, self._background = to, clock, background
        self._frame_bytes_max, self._notify = frame_bytes_max, notify
        self._decoders: dict[Peer, Decoder] = {}
        self._kept: defaultdict[Part, dict[int, Vector]] = defaultdict(dict)  # by shard

    # --- events -----------------------------------------------------------------------------------

    def connected(self, peer: Peer, host: str) -> None:
        """Start a connection from `host`."""

        def room(message: WireMessage, num_bytes: int) -> memoryview | None:
            assert isinstance(message, UPLOADS), "a worker sends no other gradients"
            kept = self.machine.keeps(peer, message)
            return np.empty(num_bytes, np.uint8).data if kept else None

        self._decoders[peer] = Decoder(bytes_max=SHORT_BYTES_MAX, kinds=(JoinRequest,), room=room)
        self._follow(self.machine.connected(peer, host, self._clock()))

    def buffer(self, peer: Peer) -> memoryview | None:
        """Return the memory for the next bytes from `peer`; None to discard them."""
        decoder = self._decoders.get(peer)
        return None if decoder is None else decoder.buffer()

    def filled(self, peer: Peer, num_bytes: int) -> None:
        """Process the `num_bytes` bytes that were written to `buffer(peer)`."""
        decoder, now = self._decoders.get(peer), self._clock()
        if decoder is None:
            return
        self.machine.heard(peer, now)
        try:
            received = decoder.filled(num_bytes)
        except ProtocolError as error:
            self._follow(self.machine.lost(peer, str(error), now))
            return
        if received is not None:
            self._follow(self._receive(peer, received, now), received)

    def lost(self, peer: Peer, reason: str) -> None:
        """Report to the state machine that the connection is lost or must end."""
        self._decoders.pop(peer, None)
        self._follow(self.machine.lost(peer, reason, self._clock()))

    def tick(self) -> None:
        """Pass the current time to the state machine."""
        self._follow(self.machine.tick(self._clock()))

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run after the current step, or at once if `at_once`."""
        self._follow(self.machine.stop(reason, at_once=at_once))

    def _receive(self, peer: Peer, received: Received, now: float) -> list[Effect]:
        message, gradients = received.message, received.gradients
        if gradients is not None and isinstance(message, UPLOADS):
            vector = _vector(gradients)
            element = first_not_finite(vector)
            if element is not None:
                value = float(vector[element])
                return self.machine.not_finite(peer, message, element, value)
        return self.machine.receive(peer, message, now, kept=gradients is not None)

    # --- effects ----------------------------------------------------------------------------------

    def _follow(self, effects: Sequence[Effect], received: Received | None = None) -> None:
        """Carry out `effects`, which the message `received` caused."""
        for effect in effects:
            match effect:
                case wire.Tell(peer, message, part):
                    self._tell(peer, message, part)
                case wire.Admit(peer):
                    decoder = self._decoders[peer]
                    decoder.bytes_max, decoder.kinds = self._frame_bytes_max, FROM_WORKERS
                    self._wire.admit(peer)
                case wire.KeepPart(_, shard, part):
                    assert received is not None, "what is kept was received"
                    assert received.gradients is not None, "what is kept has memory"
                    self._kept[part][shard] = _vector(received.gradients)
                case wire.VoidPart(shard, part):
                    del self._kept[part][shard]
                case wire.BeginStep():
                    self.averages.clear()
                case wire.AveragePart(step, part, weights):
                    self._average(step, part, weights)
                case do.Close(peer, reason):
                    self._decoders.pop(peer, None)
                    self._wire.close(peer, reason)
                case do.Finish():
                    self.finished = effect
                    self._kept.clear()
            self._notify(effect)

    def _tell(self, peer: Peer, message: WireMessage, part: Part | None) -> None:
        if peer not in self._decoders:
            return
        gradients = b"" if part is None else self.averages[part].vector.data
        counts = self._decoders[peer].counts
        self._wire.write(peer, message, list(encode(message, gradients, counts=counts)))

    def _average(self, step: int, part: Part, weights: tuple[int, ...]) -> None:
        kept = self._kept.pop(part)
        vectors = [kept[shard] for shard in sorted(kept)]
        kept.clear()

        def work() -> Average:
            since = self._clock()
            mean = weighted_mean(vectors, weights)
            vectors.clear()
            digest = str(blake3(mean.view(np.uint8).data).hexdigest(16))
            return Average(mean, digest, self._clock() - since)

        def done(average: Average) -> None:
            if self.finished is None:
                self.averages[part] = average
                self._follow(self.machine.averaged(step, part, self._clock()))

        self._background.run(work, done)


def _vector(gradients: memoryview) -> Vector:
    return np.frombuffer(gradients, "<f4")


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
        self._background = Thread()
        self.end = AveragingEnd(
            *(machine, self, time.monotonic, self._background),
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

        Port 0 selects a free port. Raises UsageError if other machines can connect and `insecure`
        is false. Raises OSError if an address is in use, or if `host` has no address.
        """
        addresses = await sockets.resolve(host, port)
        if not insecure and not all(map(sockets.is_loopback, addresses)):
            raise UsageError(
                f"listen={host}:{port}: other machines can connect there, and this wire has no "
                "authentication: any peer that connects can change what is trained; listen at "
                "127.0.0.1, or say --insecure"
            )
        listeners = sockets.listen(addresses)
        self._door = Door(
            listeners, self._opened, context=None, patience_s=self.end.machine.patience.hello_s
        )
        name = listeners[0].getsockname()
        return name[0], name[1]

    async def finish(self) -> do.Finish:
        """Return the Finish of the run, after the last messages are sent.

        Raises any exception that the endpoint raised during the run.
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
            self._background.close()

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run after the current step, or at once when `at_once` is true."""
        self.end.stop(reason, at_once=at_once)
        self._look()

    # --- called by the end ------------------------------------------------------------------------

    def write(self, peer: Peer, message: WireMessage, buffers: Sequence[Buffer]) -> None:
        """Send a message.

        For a worker that doesn't read, at most the averages of two steps are queued: it has a shard
        to deliver in every step except an epoch's last, which may have too few shards.
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
        finish = self.end.finished
        stopped = finish is not None and finish.status == "stopped"
        return FAREWELL_S if stopped else self.end.machine.patience.shard_s

    # --- called by the network --------------------------------------------------------------------

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
        loop.default_exception_handler(context)
        if "exception" in context and not self._finished.done():
            self._finished.set_exception(context["exception"])
