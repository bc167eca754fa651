"""An end of the protocol: a machine, its codecs and its hands, without the network.

A driver tells an end what bytes came and what time it is; the end does what its machine wants done
and writes to the driver's `Wire`. Hands do the arithmetic and keep the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from entrenar_py.drivers.message_faults import Speak, truthfully
from entrenar_py.drivers.stream import Meter, Stream
from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import effects as do
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.effects import Effect, Peer
from entrenar_py.protocol.frames import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Buffer,
    Decoder,
    Encoder,
    Received,
)
from entrenar_py.protocol.messages import (
    Average,
    Message,
    NonFinite,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.protocol.worker import Worker

Outcome = TypeVar("Outcome")

# What is to be done, and the message of which it follows.
Follow: TypeAlias = tuple[Effect, Received | None]


# Is told of each effect when it was done.
Notify = Callable[[Effect], None]


def unnoticed(effect: Effect) -> None:
    """Nobody wants to know."""


class Wire(Protocol):
    """The way of an end's bytes."""

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Sends `message`, which `buffers` are, after everything before."""
        ...

    def close(self, peer: Peer, reason: str) -> None:
        """Ends the connection once all is sent; nothing of it is told to the end any more."""
        ...


class Beside(Protocol):
    """A thread, or a simulated one, to which an end leaves work that takes a while."""

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Calls `work`, and tells the end later what came of it; all in the order given."""
        ...

    def forget(self) -> None:
        """Returns when nothing of what was given goes on; nothing more of it is told."""
        ...


class ServerHands(Protocol):
    """The coordinator's arithmetic and record (`systems.server`)."""

    def sizes(self) -> Mapping[type[Message], int]: ...
    def room(self, message: Message, num_bytes: int) -> memoryview: ...
    def require(self, rank: int, message: Message, payload: Buffer) -> None: ...
    def keep(self, rank: int, message: Message, payload: Buffer) -> None: ...
    def deliver(self, rank: int) -> None: ...
    def copy(self, rank: int, message: Message, payload: Buffer) -> None: ...
    def end_copy(self, rank: int, shard: int) -> None: ...
    def compare(self, shard: int) -> Callable[[], tuple[list[int], list[int]]]: ...
    def conclude(self, effect: do.Conclude) -> None: ...
    def payload(self, message: Message) -> Buffer: ...
    def joined(self, effect: do.Joined) -> None: ...
    def left(self, effect: do.Left) -> None: ...
    def gather(self, step: int) -> None: ...
    def complete(self, block: int) -> None: ...
    def reduce(self, block: int) -> tuple[float, float] | str: ...
    def prepare(self, step: int) -> tuple[float, float]: ...
    def apply_average(self, step: int) -> None: ...
    def save(self, step: int) -> None: ...
    def stop(self, effect: do.Stop) -> None: ...


class MemberHands(Protocol):
    """A worker's arithmetic and record (`systems.member`)."""

    def sizes(self) -> Mapping[type[Message], int]: ...
    def room(self, message: Message, num_bytes: int) -> memoryview: ...
    def require(self, message: Message, payload: Buffer) -> None: ...
    def load(self, welcome: Welcome, payload: Buffer) -> None: ...
    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite: ...
    def hold(self, message: Average | Weights, payload: Buffer) -> None: ...
    def make_held(self, step: int) -> None: ...
    def payload(self, message: Message) -> Buffer: ...


class CoordinatorEnd:
    """The coordinator. `finished` is its Finish effect, once there is one."""

    def __init__(
        self,
        machine: Coordinator,
        hands: ServerHands,
        wire: Wire,
        clock: Callable[[], float],
        beside: Beside,
        *,
        proved: Callable[[Peer], None] = lambda peer: None,
        notify: Notify = unnoticed,
    ) -> None:
        """`beside` is where blocks are reduced, copies compared and steps prepared. `proved` is
        told which peer has proved to know the secret.
        """
        self._proved, self._notify = proved, notify
        self.machine, self.hands, self._wire, self._clock = machine, hands, wire, clock
        self._beside = beside
        self.finished: do.Finish | None = None
        self.meter = Meter()
        self._sizes = hands.sizes()
        self._streams: dict[Peer, Stream] = {}

    def connected(self, peer: Peer, nonce: str, host: str = "") -> None:
        """Someone connected from `host`; `nonce` is 32 random hex digits."""
        limit = self._sizes.get
        decoder = Decoder(
            lambda kind: limit(kind, 0), direction=TO_COORDINATOR, room=self.hands.room
        )
        self._streams[peer] = Stream(decoder, Encoder(direction=FROM_COORDINATOR), self.meter)
        self._do(self.machine.connected(peer, nonce, self._clock(), host))

    @property
    def num_streams(self) -> int:
        """The number of open connections."""
        return len(self._streams)

    def buffer(self, peer: Peer) -> memoryview | None:
        """Return where the next bytes of `peer` go; None if they go nowhere any more."""
        stream = self._streams.get(peer)
        return None if stream is None else stream.decoder.buffer()

    def filled(self, peer: Peer, num_bytes: int) -> None:
        """`num_bytes` were written to `buffer`."""
        now, stream = self._clock(), self._streams[peer]
        num_frames = stream.decoder.num_frames
        try:
            received = stream.filled(num_bytes)
            if stream.decoder.num_frames > num_frames:
                self.machine.heard(peer, now)
            if received is not None:
                message, payload = received.message, received.payload
                rank = self.machine.peers[peer].rank
                if rank is not None:
                    self.hands.require(rank, message, payload)
                self._do(self.machine.receive(peer, message, now), payload)
        except ProtocolError as error:
            self._do(self.machine.broken(peer, str(error), now))

    def lost(self, peer: Peer, reason: str) -> None:
        """The connection is gone."""
        if peer in self._streams:
            self._do(self.machine.lost(peer, reason, self._clock()))

    def tick(self) -> None:
        """Time has passed."""
        self._do(self.machine.tick(self._clock()))

    def stop(self, reason: str, *, at_once: bool) -> None:
        """The run is to end: after the step in work, or `at_once`."""
        self._do(self.machine.stop(reason, self._clock(), at_once=at_once))

    def _do(self, wanted: Iterable[Effect], payload: Buffer | None = None) -> None:
        """Does everything that is wanted, and what follows from that, in order."""
        waiting = deque(wanted)
        while waiting:
            effect = waiting.popleft()
            waiting.extend(self._one(effect, payload))
            self._notify(effect)

    def _one(self, effect: Effect, payload: Buffer | None) -> list[Effect]:
        match effect:
            case do.Send(peer, message):
                content = self.hands.payload(message)
                frames = self._streams[peer].encode(message, content)
                self._wire.write(peer, message, frames)
            case do.Secure(peer, key):
                self._streams[peer].secure(key)
                self._proved(peer)
            case do.Close(peer, reason):
                del self._streams[peer]
                self._wire.close(peer, reason)
            case do.Keep(rank, message):
                assert payload is not None, "what is kept was received"
                self.hands.keep(rank, message, payload)
            case do.Joined():
                self.hands.joined(effect)
            case do.Left():
                self.hands.left(effect)
            case do.Gather(step):
                self._beside.forget()  # it was of a step that is over, or did not happen
                self.hands.gather(step)
            case do.Deliver(rank):
                self.hands.deliver(rank)
            case do.Copy(rank, message):
                assert payload is not None, "what is kept was received"
                self.hands.copy(rank, message, payload)
            case do.EndCopy(rank, shard):
                self.hands.end_copy(rank, shard)
            case do.Compare(step, shard):
                self._beside.run(
                    self.hands.compare(shard),
                    lambda found: self._do(
                        self.machine.compared(step, shard, *found, self._clock())
                    ),
                )
            case do.Conclude():
                self.hands.conclude(effect)
            case do.Reduce(step, block):
                self.hands.complete(block)
                self._beside.run(
                    partial(self.hands.reduce, block),
                    lambda reduced: self._do(self._reduced(step, reduced, block)),
                )
            case do.Prepare(step):
                self._beside.run(
                    partial(self.hands.prepare, step),
                    lambda made: self._do(self.machine.prepared(step, *made, self._clock())),
                )
            case do.Apply(step):
                self.hands.apply_average(step)
            case do.Save(step):
                self.hands.save(step)
            case do.Stop():
                self.hands.stop(effect)
            case do.Finish():
                self._beside.forget()
                self.finished = effect
            case _:
                raise AssertionError(f"{effect} is not the coordinator's")
        return []

    def _reduced(self, step: int, reduced: tuple[float, float] | str, block: int) -> list[Effect]:
        if isinstance(reduced, str):
            return self.machine.refused(step, reduced)
        loss, weight = reduced
        return self.machine.reduced(step, block, loss, weight, self._clock())


class WorkerEnd:
    """A worker. What it computes is left to the driver: `compute` gets the effect and answers later
    with `computed`. `finished` is its Finish effect, once there is one. `speak` may have it lie.
    `meter` counts what it exchanges with the coordinator.
    """

    def __init__(
        self,
        machine: Worker,
        hands: MemberHands,
        wire: Wire,
        clock: Callable[[], float],
        compute: Callable[[do.Compute], None],
        speak: Speak = truthfully,
        *,
        notify: Notify = unnoticed,
    ) -> None:
        self.machine, self.hands, self._wire, self._clock = machine, hands, wire, clock
        self._notify = notify
        self.finished: do.Finish | None = None
        self.num_stays = 0  # how often it was let in
        self.meter = Meter()
        self._compute, self._speak = compute, speak
        self._sizes = hands.sizes()
        self._stream = self._new_stream()

    def connected(self, peer: Peer, nonce: str) -> None:
        """Connected to the coordinator; `nonce` is 32 random hex digits."""
        self._stream = self._new_stream()
        self._do(self.machine.connected(peer, nonce, self._clock()))

    def buffer(self) -> memoryview:
        """Return where the next bytes go."""
        return self._stream.decoder.buffer()

    def filled(self, num_bytes: int) -> None:
        """`num_bytes` were written to `buffer`."""
        now, stream = self._clock(), self._stream
        num_frames = stream.decoder.num_frames
        try:
            received = stream.filled(num_bytes)
            if stream.decoder.num_frames > num_frames:
                self.machine.heard(now)
            if received is not None:
                self.hands.require(received.message, received.payload)
                self._do(self.machine.receive(received.message, now), received)
        except ProtocolError as error:
            self._do(self.machine.broken(str(error)))

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self._do(self.machine.lost(reason))

    def computed(self, asked: do.Compute, outcome: list[TreeNode] | NonFinite) -> None:
        """Take what came of `asked`."""
        self._do(self.machine.computed(asked, outcome))

    def tick(self) -> None:
        """Time has passed."""
        self._do(self.machine.tick(self._clock()))

    def leave(self, reason: str) -> None:
        """This worker is to go, and to say why."""
        self._do(self.machine.leave(reason))

    def _new_stream(self) -> Stream:
        limit = self._sizes.get
        decoder = Decoder(
            lambda kind: limit(kind, 0), direction=FROM_COORDINATOR, room=self.hands.room
        )
        return Stream(decoder, Encoder(direction=TO_COORDINATOR), self.meter)

    def _do(self, wanted: Iterable[Effect], received: Received | None = None) -> None:
        """Does everything that is wanted, and what follows from that, in order.

        `received` is the message of which it follows.
        """
        waiting = deque((effect, received) for effect in wanted)
        while waiting:
            effect, source = waiting.popleft()
            waiting.extend(self._one(effect, source))
            self._notify(effect)

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Send(peer, message):
                self._send(self._stream, peer, message)
            case do.Secure(_, key):
                self._stream.secure(key)
            case do.Close(peer, reason):
                self._wire.close(peer, reason)
            case do.Load():
                assert received is not None
                assert isinstance(received.message, Welcome)
                self.num_stays += 1
                self.hands.load(received.message, received.payload)
            case do.Compute():
                self._compute(effect)
            case do.Hold():
                assert received is not None
                assert isinstance(received.message, Average | Weights)
                self.hands.hold(received.message, received.payload)
            case do.Make(step):
                self.hands.make_held(step)
            case do.Finish():
                self.finished = effect
            case _:
                raise AssertionError(f"{effect} is not a worker's")
        return []

    def _send(self, stream: Stream, peer: Peer, message: Message) -> None:
        for said, content in self._speak(message, self.hands.payload(message)):
            self._wire.write(peer, said, stream.encode(said, content))
