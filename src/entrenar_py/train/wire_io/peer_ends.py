"""The endpoints of workers that talk to each other, in a mesh, a ring or a layer pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.frames import FROM_COORDINATOR, TO_COORDINATOR, Buffer, Received
from entrenar_py.train.wire.mesh_worker import MeshWorker, RingWorker
from entrenar_py.train.wire.messages import Message, NonFinite, Partial, TreeNode, Welcome
from entrenar_py.train.wire.pipeline_peers import Passed, PipelineWorker
from entrenar_py.train.wire_io.endpoints import (
    Background,
    Connection,
    Follow,
    MemberHands,
    Meter,
    Notify,
    Wire,
    WorkerEnd,
    payload_of,
    unnoticed,
)
from entrenar_py.train.wire_io.injections import Speak, truthfully


class Exchange(Protocol):
    """The arithmetic of blocks that other workers send (`coordinator.topology`)."""

    def complete(self, block: int) -> None: ...
    def reduce(self, block: int) -> tuple[float, float] | None: ...


class TreeExchange(Exchange, Protocol):
    """The arithmetic of a mesh: nodes are added along the reduction tree."""

    def keep(self, rank: int, node: TreeNode, payload: Buffer) -> None: ...
    def contribute(self, node: TreeNode) -> None: ...


class RingExchange(Exchange, Protocol):
    """The arithmetic of a ring: each worker adds its own part to a block and passes it on."""

    def combine(
        self, block: int, message: Partial | None, payload: Buffer
    ) -> tuple[float, float]: ...


class MeshHands(MemberHands, Protocol):
    """The arithmetic of a worker in a mesh or a ring, as in `coordinator.member`."""

    @property
    def exchange(self) -> Exchange: ...
    def regroup(self, number: int) -> None: ...


class MeshEnd(WorkerEnd):
    """A mesh worker's endpoint of the protocol.

    The driver's `dial` connects, then calls the method `dialed` or `undialable`. `links_meter`
    counts the messages from and to other workers.
    """

    machine: MeshWorker
    hands: MeshHands

    def __init__(
        self,
        machine: MeshWorker,
        hands: MeshHands,
        wire: Wire,
        clock: Callable[[], float],
        compute: Callable[[Any], None],
        dial: Callable[[do.Dial], None],
        background: Background,
        speak: Speak = truthfully,
        *,
        proved: Callable[[Peer], None] = lambda peer: None,
        notify: Notify = unnoticed,
    ) -> None:
        """Reduce blocks in `background`."""
        super().__init__(machine, hands, wire, clock, compute, speak, proved=proved, notify=notify)
        self.links_meter = Meter()
        self._dial, self._background = dial, background
        self._postponed: list[tuple[Peer, Received]] = []

    def accepted(self, peer: Peer, nonce: str) -> None:
        """Start a connection from another worker; `nonce` has 32 random hex digits."""
        self._link(peer, FROM_COORDINATOR)
        self._do(self.machine.links.accepted(peer, nonce, self._clock()))

    def dialed(self, peer: Peer, dial: do.Dial, nonce: str) -> None:
        """Start the connection that `dial` requested; `nonce` has 32 random hex digits."""
        self._link(peer, TO_COORDINATOR)
        self._do(self.machine.links.dialed(peer, dial, nonce, self._clock()))

    def undialable(self, dial: do.Dial, reason: str) -> None:
        """Report to the state machine that `dial` failed."""
        self._do(self.machine.undialable(dial, reason))

    def _link(self, peer: Peer, direction: int) -> None:
        """Set up a connection to another worker; frames sent on it are marked with `direction`."""
        lost = partial(self.machine.lost_link, peer)
        self._connections[peer] = Connection(
            self._stream(direction, self.links_meter),
            heard=partial(self.machine.links.heard, peer),
            receive=partial(self.machine.receive_from, peer),
            broken=lost,
            lost=lost,
        )

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Dial():
                self._dial(effect)
            case do.Keep(rank, message):
                assert isinstance(message, TreeNode)
                tree = cast(TreeExchange, self.hands.exchange)
                tree.keep(rank, message, payload_of(received))
            case do.Contribute(node):
                cast(TreeExchange, self.hands.exchange).contribute(node)
            case do.Reduce(step, block):
                self.hands.exchange.complete(block)
                self._background.run(
                    partial(self.hands.exchange.reduce, block),
                    lambda reduced: self._do(self._reduced(step, reduced, block)),
                )
            case do.Combine(step, block):
                return [(follow, None) for follow in self._combined(step, block, received)]
            case do.Regroup(number):
                self._background.forget()  # its work is for a round that is over
                self.hands.regroup(number)
            case do.Load() | do.Finish():
                self._background.forget()
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
        return self.machine.reduced(step, block, *reduced)

    def _combined(self, step: int, block: int, received: Received | None) -> list[Effect]:
        assert isinstance(self.machine, RingWorker)
        exchange = cast(RingExchange, self.hands.exchange)
        if received is None or not isinstance(received.message, Partial):
            total = exchange.combine(block, None, b"")
        else:
            total = exchange.combine(block, received.message, received.payload)
        return self.machine.combined(step, block, *total)

    def _again(self) -> list[Follow]:
        """Process the postponed messages again.

        A message that turns out to be illegal ends the link over which it arrived.
        """
        postponed, self._postponed = self._postponed, []
        follows, now = list[Follow](), self._clock()
        for peer, received in postponed:
            try:
                self.hands.require(received.message, received.payload)
            except ProtocolError as error:
                effects = self.machine.lost_link(peer, str(error))
            else:
                effects = self.machine.receive_from(peer, received.message, now)
            follows += [(effect, received) for effect in effects]
        return follows


class PipelineHands(MeshHands, Protocol):
    """The arithmetic of one stage, as in `stages.member`."""

    def receive(self, message: Message, payload: Buffer) -> None: ...
    def take(self, welcome: Welcome, payload: Buffer) -> None: ...
    def load_taken(self) -> None: ...
    def bind(self, asked: do.Pass) -> None: ...
    def run(self, asked: do.Pass) -> Passed | NonFinite: ...


class PipelineEnd(MeshEnd):
    """The endpoint of a stage's worker; its work is passes."""

    machine: PipelineWorker
    hands: PipelineHands

    def work(self, asked: Any) -> Any:
        """Return the outcome of the pass `asked`, or load the stage; may run in any thread."""
        return self.hands.load_taken() if isinstance(asked, do.Load) else self.hands.run(asked)

    def computed(self, effect: Any, outcome: Any) -> None:
        """Report the `outcome` of `effect`."""
        if isinstance(effect, do.Load):
            self._do(self.machine.loaded(effect))
        else:
            self._do(self.machine.passed(effect, outcome))

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Load():
                assert received is not None, "a state was received"
                assert isinstance(received.message, Welcome), "with a welcome"
                self.num_stays += 1
                self.hands.take(received.message, received.payload)
                self._compute(effect)
            case do.Pass():
                self.hands.bind(effect)
                self._compute(effect)
            case do.Receive(message):
                self.hands.receive(message, payload_of(received))
            case _:
                return super()._one(effect, received)
        return []
