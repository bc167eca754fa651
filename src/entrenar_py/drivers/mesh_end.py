"""A worker's end in a mesh: the connection to the coordinator, and one to each other worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from entrenar_py.drivers.endpoints import (
    Beside,
    Follow,
    MemberHands,
    Notify,
    Wire,
    WorkerEnd,
    unnoticed,
)
from entrenar_py.drivers.message_faults import Speak, truthfully
from entrenar_py.drivers.stream import Meter, Stream
from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import effects as do
from entrenar_py.protocol.effects import Effect, Peer
from entrenar_py.protocol.frames import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Buffer,
    Decoder,
    Encoder,
    Received,
)
from entrenar_py.protocol.mesh_worker import MeshWorker
from entrenar_py.protocol.messages import Partial, TreeNode
from entrenar_py.protocol.ring_worker import RingWorker


class Exchange(Protocol):
    """The arithmetic of blocks that other workers send (`systems.star.exchanges`)."""

    def complete(self, block: int) -> None: ...
    def reduce(self, block: int) -> tuple[float, float] | None: ...


class TreeExchange(Exchange, Protocol):
    """A mesh's: nodes are added along the tree."""

    def keep(self, rank: int, node: TreeNode, payload: Buffer) -> None: ...
    def contribute(self, node: TreeNode) -> None: ...


class RingExchange(Exchange, Protocol):
    """A ring's: each worker adds its own part to what passes."""

    def combine(
        self, block: int, message: Partial | None, payload: Buffer
    ) -> tuple[float, float]: ...


class MeshHands(MemberHands, Protocol):
    """The arithmetic of a worker in a mesh, or a ring (`systems.star.member`)."""

    @property
    def exchange(self) -> Exchange: ...
    def regroup(self, number: int) -> None: ...


class MeshEnd(WorkerEnd):
    """`dial` is the driver's: it connects, and says `dialed` or `undialable`. `links_meter` counts
    what this worker exchanges with the others.
    """

    machine: MeshWorker
    hands: MeshHands

    def __init__(
        self,
        machine: MeshWorker,
        hands: MeshHands,
        wire: Wire,
        clock: Callable[[], float],
        compute: Callable[[do.Compute], None],
        dial: Callable[[do.Dial], None],
        beside: Beside,
        speak: Speak = truthfully,
        *,
        proved: Callable[[Peer], None] = lambda peer: None,
        notify: Notify = unnoticed,
    ) -> None:
        """`beside` is where blocks are reduced. `proved` is told which of the peers that were
        accepted, or dialed, has proved to know the secret.
        """
        self._proved = proved
        super().__init__(machine, hands, wire, clock, compute, speak, notify=notify)
        self.links_meter = Meter()
        self._dial, self._beside = dial, beside
        self._links: dict[Peer, Stream] = {}
        self._postponed: list[tuple[Peer, Received]] = []

    def accepted(self, peer: Peer, nonce: str) -> None:
        """Someone has connected; `nonce` is 32 random hex digits."""
        self._links[peer] = self._link(FROM_COORDINATOR, TO_COORDINATOR)
        self._do(self.machine.accepted(peer, nonce, self._clock()))

    def dialed(self, peer: Peer, dial: do.Dial, nonce: str) -> None:
        """Take a connection that was asked for."""
        self._links[peer] = self._link(TO_COORDINATOR, FROM_COORDINATOR)
        self._do(self.machine.dialed(peer, dial, nonce, self._clock()))

    def undialable(self, dial: do.Dial, reason: str) -> None:
        """It can't be."""
        self._do(self.machine.undialable(dial, reason))

    def buffer_of(self, peer: Peer) -> memoryview | None:
        """Return where the next bytes of another worker go; None if they go nowhere any more."""
        link = self._links.get(peer)
        return None if link is None else link.decoder.buffer()

    def filled_from(self, peer: Peer, num_bytes: int) -> None:
        """`num_bytes` were written to `buffer_of`."""
        now, stream = self._clock(), self._links[peer]
        num_frames = stream.decoder.num_frames
        try:
            received = stream.filled(num_bytes)
            if stream.decoder.num_frames > num_frames:
                self.machine.heard_from(peer, now)
            if received is not None:
                self.hands.require(received.message, received.payload)
                self._do(self.machine.receive_from(peer, received.message, now), received)
        except ProtocolError as error:
            self._do(self.machine.lost_link(peer, str(error)))

    def lost_link(self, peer: Peer, reason: str) -> None:
        """A connection to another worker is gone."""
        if peer in self._links:
            self._do(self.machine.lost_link(peer, reason))

    def _link(self, ours: int, theirs: int) -> Stream:
        limit = self._sizes.get
        decoder = Decoder(lambda kind: limit(kind, 0), direction=theirs, room=self.hands.room)
        return Stream(decoder, Encoder(direction=ours), self.links_meter)

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Send(peer, message) if peer in self._links:
                self._send(self._links[peer], peer, message)
            case do.Secure(peer, key) if peer in self._links:
                self._links[peer].secure(key)
                self._proved(peer)
            case do.Close(peer, reason) if peer in self._links:
                del self._links[peer]
                self._wire.close(peer, reason)
            case do.Dial():
                self._dial(effect)
            case do.Keep(rank, message):
                assert received is not None, "what is kept was received"
                assert isinstance(message, TreeNode)
                cast(TreeExchange, self.hands.exchange).keep(rank, message, received.payload)
            case do.Contribute(node):
                cast(TreeExchange, self.hands.exchange).contribute(node)
            case do.Reduce(step, block):
                self.hands.exchange.complete(block)
                self._beside.run(
                    partial(self.hands.exchange.reduce, block),
                    lambda reduced: self._do(self._reduced(step, reduced, block)),
                )
            case do.Combine(step, block):
                return [(one, None) for one in self._combined(step, block, received)]
            case do.Regroup(number):
                self._beside.forget()  # it was of a round that is over
                self.hands.regroup(number)
            case do.Load() | do.Finish():
                self._beside.forget()
                return super()._one(effect, received)
            case do.Postpone(peer):
                assert received is not None, "what is postponed was received"
                self._postponed.append((peer, received))
            case do.Again():
                return self._again()
            case _:
                return super()._one(effect, received)
        return []

    def _reduced(self, step: int, reduced: tuple[float, float] | None, block: int) -> list[Effect]:
        if reduced is None:
            return self.machine.overflowed(step, block)
        loss, weight = reduced
        return self.machine.reduced(step, block, loss, weight)

    def _combined(self, step: int, block: int, received: Received | None) -> list[Effect]:
        assert isinstance(self.machine, RingWorker)
        exchange = cast(RingExchange, self.hands.exchange)
        if received is None or not isinstance(received.message, Partial):
            loss, weight = exchange.combine(block, None, b"")
        else:
            loss, weight = exchange.combine(block, received.message, received.payload)
        return self.machine.combined(step, block, loss, weight)

    def _again(self) -> list[Follow]:
        told, self._postponed = self._postponed, []
        now = self._clock()
        return [
            (effect, received)
            for peer, received in told
            for effect in self.machine.receive_from(peer, received.message, now)
        ]
