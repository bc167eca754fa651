"""One endpoint of the protocol: a state machine with its codecs, without the network.

A driver passes received bytes and clock ticks to an endpoint (`End`). The endpoint carries out the
effects of its state machine, and writes to the driver's `Wire`. The *hands* of an endpoint are the
object that does the arithmetic and records the run's events.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.frames import (
    FROM_COORDINATOR,
    TO_COORDINATOR,
    Buffer,
    Decoder,
    Encoder,
    Received,
    Room,
)
from entrenar_py.train.wire.messages import (
    VERSION,
    Average,
    Message,
    NonFinite,
    Piece,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.terms import WANTED_MAX
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.injections import Speak, truthfully


@dataclass(slots=True)
class Count:
    """Counts for one type of message; `bytes` includes prefixes, headers and payloads."""

    messages: int = 0
    payload_bytes: int = 0
    bytes: int = 0


class Meter:
    """Counts the messages and bytes of connections, by type of message.

    Sent bytes count when they are taken for writing, which may happen in a connection's thread. A
    partly sent message counts in `bytes` only.
    """

    def __init__(self) -> None:
        self.sent: defaultdict[str, Count] = defaultdict(Count)
        self.got: defaultdict[str, Count] = defaultdict(Count)
        self._lock = Lock()

    def write(self, message: Message, num_bytes: int) -> None:
        """Count `num_bytes` of `message` as sent."""
        with self._lock:
            self.sent[type(message).__name__].bytes += num_bytes

    def wrote(self, message: Message, payload_bytes: int) -> None:
        """Count `message` as sent completely."""
        with self._lock:
            count = self.sent[type(message).__name__]
            count.messages += 1
            count.payload_bytes += payload_bytes

    def read(self, received: Received, num_bytes: int) -> None:
        """Count a whole received message of `num_bytes`."""
        with self._lock:
            count = self.got[type(received.message).__name__]
            count.messages += 1
            count.payload_bytes += received.payload.nbytes
            count.bytes += num_bytes


class Stream:
    """The codecs of one connection; `meter` counts their messages."""

    def __init__(
        self, sizes: Mapping[type[Message], int], room: Room, direction: int, meter: Meter
    ) -> None:
        """Start both codecs; frames are sent with `direction`.

        `sizes` has the most payload bytes of each message type, 0 for types that it lacks.
        """
        self.decoder = Decoder(lambda kind: sizes.get(kind, 0), direction=1 - direction, room=room)
        self.encoder, self._meter = Encoder(direction=direction), meter
        self._came_bytes = 0  # of the message that is being received

    def secure(self, key: bytes) -> None:
        """Use `key` for all later frames, in both directions."""
        self.decoder.key = self.encoder.key = key

    def encode(self, message: Message, payload: Buffer) -> Iterator[Buffer]:
        """Yield the bytes of `message` in pieces.

        The caller takes each piece when it can be sent.
        """
        for buffer in self.encoder.encode(message, payload):
            self._meter.write(message, memoryview(buffer).nbytes)
            yield buffer
        self._meter.wrote(message, memoryview(payload).nbytes)

    def filled(self, num_bytes: int) -> Received | None:
        """Return the message that `num_bytes` more complete, or None; see `Decoder.filled`."""
        self._came_bytes += num_bytes
        received = self.decoder.filled(num_bytes)
        if received is not None:
            self._meter.read(received, self._came_bytes)
            self._came_bytes = 0
        return received


# Returns the bytes of a piece, or the reason why they can't be read.
ReadPiece = Callable[[Piece], bytes | str]


def no_piece(piece: Piece) -> bytes | str:
    """Return the reason why a run without a package has no pieces."""
    return f"file {piece.file}: this run has no files"


@dataclass(slots=True)
class ServedPieces:
    """The pieces that were requested over one connection and are not sent yet."""

    _due: deque[Piece] = field(default_factory=deque)

    def add(self, piece: Piece) -> None:
        """Note a request for `piece`.

        Raises ProtocolError if too many requests are open, so that memory stays bounded.
        """
        # A piece leaves the list a moment after its last byte was sent.
        if len(self._due) >= 2 * WANTED_MAX:
            raise ProtocolError(f"Want: more than {WANTED_MAX} pieces at a time")
        self._due.append(piece)

    def encode(self, stream: Stream, piece: Piece, content: bytes) -> Iterator[Buffer]:
        """Yield the bytes of `piece` in parts, perhaps in a connection's thread."""
        yield from stream.encode(piece, content)
        self._due.popleft()


# Writes a checkpoint, in any thread, and returns a function that records it, for the first thread.
Saving: TypeAlias = Callable[[], Callable[[], None]]


class ServerHands(Protocol):
    """The coordinator's arithmetic and recording, as in `coordinator.server`."""

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
    def piece(self, piece: Piece) -> bytes | str: ...
    def joined(self, effect: do.Joined) -> None: ...
    def left(self, effect: do.Left) -> None: ...
    def gather(self, step: int) -> None: ...
    def complete(self, block: int) -> None: ...
    def reduce(self, block: int) -> tuple[float, float] | str: ...
    def prepare(self, step: int) -> tuple[float, float]: ...
    def apply_average(self, step: int) -> None: ...
    def save(self, step: int) -> Saving: ...
    def stop(self, effect: do.Stop) -> None: ...


class MemberHands(Protocol):
    """A worker's arithmetic and recording, as in `coordinator.member`."""

    def sizes(self) -> Mapping[type[Message], int]: ...
    def room(self, message: Message, num_bytes: int) -> memoryview: ...
    def require(self, message: Message, payload: Buffer) -> None: ...
    def load(self, welcome: Welcome, payload: Buffer) -> None: ...
    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite: ...
    def hold(self, message: Average | Weights, payload: Buffer) -> None: ...
    def make_held(self, step: int) -> None: ...
    def payload(self, message: Message) -> Buffer: ...


Outcome = TypeVar("Outcome")

# An effect, and the message that caused it, if any.
Follow: TypeAlias = tuple[Effect, Received | None]


# Is called with each effect after the effect was carried out.
Notify = Callable[[Effect], None]


def unnoticed(effect: Effect) -> None:
    """Ignore the effect."""


def payload_of(received: Received | None) -> Buffer:
    """Return the payload of the message that caused an effect."""
    assert received is not None, "what is kept was received"
    return received.payload


class Wire(Protocol):
    """The place to which an endpoint writes its messages."""

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send `message`, encoded in `buffers`, after all earlier messages."""
        ...

    def close(self, peer: Peer, reason: str) -> None:
        """Close the connection after all messages are sent; its later events are dropped."""
        ...


class Background(Protocol):
    """A thread, or a simulated one, for an endpoint's longer work."""

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Call `work` in this thread, then `done` with its result, in the order of calls."""
        ...

    def forget(self) -> None:
        """Stop all work and wait until it has ended; `done` is not called for it."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """The codecs of one connection, and the state machine's methods that receive its events."""

    stream: Stream
    heard: Callable[[float], None]
    receive: Callable[[Message, float], list[Effect]]
    broken: Callable[[str], list[Effect]]
    lost: Callable[[str], list[Effect]]
    pieces: ServedPieces = field(default_factory=ServedPieces)


class End:
    """An endpoint with its connections, and the effects that coordinator and worker share.

    `finished` is the Finish effect, None until the state machine requests it. `version` is that of
    its frames; a simulation sets another one.
    """

    version = VERSION

    machine: Coordinator | Worker
    hands: ServerHands | MemberHands

    def __init__(
        self,
        wire: Wire,
        clock: Callable[[], float],
        *,
        proved: Callable[[Peer], None],
        notify: Notify,
    ) -> None:
        """Start without connections.

        `proved` is called with each peer that has proved that it knows the secret.
        """
        self._wire, self._clock = wire, clock
        self._proved, self._notify = proved, notify
        self._sizes = self.hands.sizes()
        self.finished: do.Finish | None = None
        self.meter = Meter()
        self._connections: dict[Peer, Connection] = {}

    def buffer(self, peer: Peer) -> memoryview | None:
        """Return the memory for the next bytes from `peer`; None if its connection is closed."""
        connection = self._connections.get(peer)
        return None if connection is None else connection.stream.decoder.buffer()

    def filled(self, peer: Peer, num_bytes: int) -> None:
        """Process the `num_bytes` bytes that were written to `buffer(peer)`."""
        now, connection = self._clock(), self._connections[peer]
        decoder = connection.stream.decoder
        num_frames = decoder.num_frames
        try:
            received = connection.stream.filled(num_bytes)
            if decoder.num_frames > num_frames:
                connection.heard(now)
            if received is not None:
                self._require(peer, received)
                self._do(connection.receive(received.message, now), received)
        except ProtocolError as error:
            self._do(connection.broken(str(error)))

    def lost(self, peer: Peer, reason: str) -> None:
        """Report to the state machine that the connection is lost."""
        if peer in self._connections:
            self._do(self._connections[peer].lost(reason))

    def tick(self) -> None:
        """Pass the current time to the state machine."""
        self._do(self.machine.tick(self._clock()))

    def _stream(self, direction: int, meter: Meter) -> Stream:
        stream = Stream(self._sizes, self.hands.room, direction, meter)
        stream.decoder.version = stream.encoder.version = self.version
        return stream

    def _require(self, peer: Peer, received: Received) -> None:
        raise NotImplementedError

    def _do(self, wanted: Iterable[Effect], received: Received | None = None) -> None:
        """Carry out the `wanted` effects and all effects that they cause, in order.

        `received` is the message that caused the `wanted` effects, if any.
        """
        waiting = deque((effect, received) for effect in wanted)
        while waiting:
            effect, source = waiting.popleft()
            waiting.extend(self._one(effect, source))
            self._notify(effect)

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
            case do.Send(peer, message):
                self._send(peer, message)
            case do.Secure(peer, key):
                self._connections[peer].stream.secure(key)
                self._proved(peer)
            case do.Close(peer, reason):
                del self._connections[peer]
                self._wire.close(peer, reason)
            case do.Finish():
                self.finished = effect
            case _:
                raise AssertionError(f"{effect} is not one of {type(self).__name__}")
        return []

    def _send(self, peer: Peer, message: Message) -> None:
        frames = self._connections[peer].stream.encode(message, self.hands.payload(message))
        self._wire.write(peer, message, frames)


class CoordinatorEnd(End):
    """The coordinator's end of the protocol."""

    machine: Coordinator
    hands: ServerHands

    def __init__(
        self,
        machine: Coordinator,
        hands: ServerHands,
        wire: Wire,
        clock: Callable[[], float],
        background: Background,
        reading: Background,
        *,
        proved: Callable[[Peer], None] = lambda peer: None,
        notify: Notify = unnoticed,
    ) -> None:
        """Reduce blocks, compare copies, prepare steps and write checkpoints in `background`.

        Files are read in `reading`, so that no step waits for a disk.
        """
        self.machine, self.hands = machine, hands
        self._background, self._reading = background, reading
        super().__init__(wire, clock, proved=proved, notify=notify)

    def connected(self, peer: Peer, nonce: str, host: str = "") -> None:
        """Start a connection from `host`; `nonce` has 32 random hex digits."""
        machine, clock = self.machine, self._clock
        self._connections[peer] = Connection(
            self._stream(FROM_COORDINATOR, self.meter),
            heard=partial(machine.heard, peer),
            receive=partial(machine.receive, peer),
            broken=lambda reason: machine.broken(peer, reason, clock()),
            lost=lambda reason: machine.lost(peer, reason, clock()),
        )
        self._do(machine.connected(peer, nonce, clock(), host))

    def stop(self, reason: str, *, at_once: bool) -> None:
        """End the run after the current step, or `at_once`."""
        self._do(self.machine.stop(reason, self._clock(), at_once=at_once))

    def _require(self, peer: Peer, received: Received) -> None:
        rank = self.machine.peers[peer].rank
        if rank is not None:
            self.hands.require(rank, received.message, received.payload)

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        hands = self.hands
        match effect:
            case do.Keep(rank, message):
                hands.keep(rank, message, payload_of(received))
            case do.Deliver(rank):
                hands.deliver(rank)
            case do.Joined():
                hands.joined(effect)
            case do.Left():
                hands.left(effect)
            case do.Serve(peer, piece):
                return [(one, None) for one in self._serve(peer, piece)]
            case do.Gather(step):
                self._background.forget()  # its work is for a step that is over or did not happen
                hands.gather(step)
            case do.Copy(rank, message):
                hands.copy(rank, message, payload_of(received))
            case do.EndCopy(rank, shard):
                hands.end_copy(rank, shard)
            case do.Compare() | do.Reduce() | do.Prepare():
                self._work(effect)
            case do.Conclude():
                hands.conclude(effect)
            case do.Apply(step):
                hands.apply_average(step)
            case do.Save(step):
                self._background.run(hands.save(step), self._saved)
            case do.Stop():
                hands.stop(effect)
            case do.Dealt():
                pass  # it is for listeners
            case do.Finish():
                self._background.forget()
                return super()._one(effect, received)
            case _:
                return super()._one(effect, received)
        return []

    def _serve(self, peer: Peer, piece: Piece) -> list[Effect]:
        """Read a piece in the background, and send it."""
        connection = self._connections[peer]
        try:
            connection.pieces.add(piece)
        except ProtocolError as error:
            return connection.broken(str(error))

        def done(content: bytes | str) -> None:
            if self._connections.get(peer) is not connection:
                return  # it has ended
            if isinstance(content, str):
                self._do(self.machine.unreadable(peer, content, self._clock()))
                return
            frames = connection.pieces.encode(connection.stream, piece, content)
            self._wire.write(peer, piece, frames)

        self._reading.run(partial(self.hands.piece, piece), done)
        return []

    def _saved(self, record: Callable[[], None]) -> None:
        record()
        self._do(self.machine.saved(self._clock()))

    def _work(self, effect: do.Compare | do.Reduce | do.Prepare) -> None:
        """Do the work of `effect` in `background`, then pass its result to the state machine."""
        work: Callable[[], Any]
        took: Callable[..., list[Effect]]
        match effect:
            case do.Compare(step, shard):
                work, took = self.hands.compare(shard), partial(self.machine.compared, step, shard)
            case do.Reduce(step, block):
                self.hands.complete(block)
                work = partial(self.hands.reduce, block)
                took = partial(self.machine.reduced, step, block)
            case do.Prepare(step):
                work, took = partial(self.hands.prepare, step), partial(self.machine.prepared, step)

        def done(outcome: Any) -> None:
            if isinstance(outcome, str):  # why the average is not finite
                self._do(self.machine.refused(step, outcome))
            else:
                self._do(took(*outcome, self._clock()))

        self._background.run(work, done)


class WorkerEnd(End):
    """A worker's endpoint of the protocol.

    The driver's `compute` carries out a Compute, then calls the method `computed`. `speak` may
    falsify messages. `meter` counts messages from and to the coordinator.
    """

    machine: Worker
    hands: MemberHands

    def __init__(
        self,
        machine: Worker,
        hands: MemberHands,
        wire: Wire,
        clock: Callable[[], float],
        compute: Callable[[Any], None],
        speak: Speak = truthfully,
        *,
        proved: Callable[[Peer], None] = lambda peer: None,
        notify: Notify = unnoticed,
    ) -> None:
        self.machine, self.hands = machine, hands
        self._compute, self._speak = compute, speak
        self.num_stays = 0  # how often the worker was admitted
        super().__init__(wire, clock, proved=proved, notify=notify)

    def connected(self, peer: Peer, nonce: str) -> None:
        """Start a connection to the coordinator; `nonce` has 32 random hex digits."""
        machine, stream = self.machine, self._stream(TO_COORDINATOR, self.meter)
        self._connections[peer] = Connection(
            stream, machine.heard, machine.receive, machine.broken, machine.lost
        )
        self._do(machine.connected(peer, nonce, self._clock()))

    def work(self, asked: Any) -> Any:
        """Return the outcome of the effect `asked`; runs in any thread."""
        return self.hands.work(asked.step, asked.shards)

    def computed(self, asked: Any, outcome: Any) -> None:
        """Report the `outcome` of the effect `asked`."""
        self._do(self.machine.computed(asked, outcome))

    def wants(self, asked: Any) -> bool:
        """Return whether the work of the effect `asked` is still needed."""
        return self.machine.wants(asked)

    def leave(self, reason: str) -> None:
        """Leave the run for good; a connected coordinator gets the reason."""
        self._do(self.machine.leave(reason))

    def _require(self, peer: Peer, received: Received) -> None:
        self.hands.require(received.message, received.payload)

    def _one(self, effect: Effect, received: Received | None) -> list[Follow]:
        match effect:
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
            case _:
                return super()._one(effect, received)
        return []

    def _send(self, peer: Peer, message: Message) -> None:
        stream = self._connections[peer].stream
        for said, content in self._speak(message, self.hands.payload(message)):
            self._wire.write(peer, said, stream.encode(said, content))
