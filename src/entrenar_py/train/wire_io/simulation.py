"""The protocol in virtual time: every state machine, one seeded scheduler, no sockets.

Bytes arrive in order on each connection, as over TCP, after a random delay. Computing takes a
random time. The same seed gives the same run. `meddle` is called for every message and may inject a
fault.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

from entrenar_py.shared import patience
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import VERSION, Message
from entrenar_py.train.wire.pipeline_peers import PipelineCoordinator, PipelineWorker
from entrenar_py.train.wire.terms import NONCE_BYTES, Run, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.endpoints import (
    CoordinatorEnd,
    End,
    MemberHands,
    Notify,
    ServerHands,
    WorkerEnd,
    unnoticed,
)
from entrenar_py.train.wire_io.injections import (
    Fate,
    Guest,
    Meddle,
    Meddling,
    Speak,
    bent,
    truthfully,
)
from entrenar_py.train.wire_io.peer_ends import MeshEnd, MeshHands, PipelineEnd, PipelineHands
from entrenar_py.train.wire_io.simulated_links import LATENCY_S, Card, Network

Action = Callable[[], None]
Outcome = TypeVar("Outcome")


class Timeline:
    """A queue of scheduled actions. `now` is the virtual time, in seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Action]] = []

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Schedule `action` for the time `when`, after actions already scheduled for that time."""
        heapq.heappush(self._queue, (when, next(self._numbers), action))

    def later(self, seconds: float, action: Action) -> None:
        """Schedule `action` for `seconds` from now."""
        self.at(self.now + seconds, action)

    def next(self) -> None:
        """Advance to the next scheduled action, and run it."""
        self.now, _, action = heapq.heappop(self._queue)
        patience.mark()
        action()

    def has_until(self, when: float) -> bool:
        """Return whether an action is scheduled for the time `when` or earlier."""
        return bool(self._queue) and self._queue[0][0] <= when


class Later:
    """A simulated background thread.

    It does one piece of work after the other. Each takes a random time from `takes_s`.
    `process(action)` runs an action in the process that owns the thread.
    """

    def __init__(
        self,
        timeline: Timeline,
        drawn: random.Random,
        takes_s: tuple[float, float],
        process: Callable[[Action], None],
    ) -> None:
        self._timeline, self._random, self._takes_s = timeline, drawn, takes_s
        self._process = process
        self._free_at = 0.0  # when all work so far is done
        self._epoch = 0

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Schedule `work`, then `done` with its result."""
        epoch = self._epoch

        def finish() -> None:
            if epoch == self._epoch:
                done(work())

        takes_s = self._random.uniform(*self._takes_s)
        self._free_at = max(self._free_at, self._timeline.now) + takes_s
        self._timeline.at(self._free_at, lambda: self._process(finish))

    def forget(self) -> None:
        """Drop all work; `done` is not called for it."""
        self._epoch += 1
        self._free_at = 0.0


@dataclass(slots=True)
class Direction:
    """One direction of a connection, and the bytes `held` to reorder.

    Its last bytes reach the link of the receiver at `reaches`, and have passed it at `arrives`.
    """

    reaches: float = 0.0
    arrives: float = 0.0
    held: bytes = b""


@dataclass(slots=True, eq=False)
class Node:
    """A worker's process.

    `connection` is its connection to the coordinator. The process does nothing until
    `frozen_until`; if `calling`, it will connect soon. Its clock is `ahead_s` ahead.
    """

    number: int
    end: WorkerEnd = field(init=False)
    connection: Connection | None = None
    alive: bool = True
    frozen_until: float = 0.0
    calling: bool = False
    card: Card = field(default_factory=Card)
    ahead_s: float = 0.0

    def lose(self, connection: Connection, reason: str) -> None:
        """Report to the worker that `connection` is lost."""
        if self.connection is connection:
            self.connection = None
        self.end.lost(connection.peer, reason)


@dataclass(slots=True, eq=False)
class Connection:
    """A connection from `node` to the coordinator or to worker `to`; `peer` names it at both ends.

    If `dead`, all bytes are lost. If `ended`, nothing more is sent.
    """

    peer: int
    node: Node
    to: Node | None = None
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    dead: bool = False
    ended: bool = False

    def end(self, up: bool) -> Node | None:
        """Return the worker that receives bytes sent `up` or down; None for the coordinator."""
        return self.to if up else self.node


@dataclass(frozen=True, slots=True)
class SimulatedWire:
    """The wire of a simulated endpoint: `send` gets each message with its bytes in one piece."""

    send: Callable[[Peer, Message, bytes], None]
    close: Callable[[Peer, str], None]

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send `message`, which is encoded in `buffers`."""
        self.send(peer, message, b"".join(buffers))


def feed(end: End, peer: Peer, data: bytes) -> None:
    """Deliver `data` from `peer`, in the portions that `end` takes; drop bytes that it rejects."""
    left = memoryview(data)
    while left.nbytes and (place := end.buffer(peer)) is not None:
        num_bytes = min(place.nbytes, left.nbytes)
        place[:num_bytes] = left[:num_bytes]
        left = left[num_bytes:]
        end.filled(peer, num_bytes)


HOST = "simulated"
COMPUTING_S = (0.001, 0.05)
REDUCING_S = (0.0, 0.003)
RECONNECT_S = 0.5
TICK_S = 0.5
FAREWELL_S = 1.0  # how long the last messages may take


class Simulation:
    """One run. `start` starts a worker; `run` advances time until the coordinator is finished.

    `card` is the coordinator's link to the network, and its clock is `ahead_s` ahead.
    """

    def __init__(
        self,
        run: Run,
        hands: ServerHands,
        member: Callable[[], MemberHands],
        *,
        seed: int,
        meddle: Meddle,
        timing: Timing,
        secret: bytes = b"",
        worker: type[Worker] = Worker,
        notify: Notify = unnoticed,
        network: Network | None = None,
    ) -> None:
        self._time = Timeline()
        self._network = network or Network()
        self.card, self.ahead_s = Card(), 0.0
        self.nodes: list[Node] = []
        self._num_started = 0
        self._run, self._member, self._meddle = run, member, meddle
        self._worker, self._notify = worker, notify
        self._timing, self._secret = timing, secret
        self._seed, self._random = seed, random.Random(seed)
        self._numbers = count()
        self._connections: dict[Peer, Connection] = {}
        self._guests: dict[Peer, Guest] = {}
        self._reducing = self._background(lambda action: action())
        self._reading = self._background(lambda action: action())
        self.coordinator = self._new_coordinator(run, hands)
        self._tick(lambda: self.coordinator.tick(), lambda: True)

    def start(
        self,
        rank: int | None,
        backend: str,
        speak: Speak = truthfully,
        *,
        version: int = VERSION,
    ) -> Node:
        """Return a new worker process; it connects at once, and requests `rank` unless None.

        `version` is the one of the protocol that it speaks.
        """
        node = Node(self._num_started)
        node.end = self._new_end(node, rank, backend, speak)
        node.end.version = version
        self._num_started += 1
        self.nodes = [*(other for other in self.nodes if other.alive), node]
        self._connect(node)
        self._tick(lambda: self._to(node, node.end.tick), lambda: node.alive)
        return node

    def _new_end(self, node: Node, rank: int | None, backend: str, speak: Speak) -> WorkerEnd:
        terms, member = self._run.terms, self._member()
        wire = SimulatedWire(partial(self._said, node), partial(self._closed, node))
        compute, clock = partial(self._work, node), lambda: self.now + node.ahead_s
        kept: dict[str, Any] = {"secret": self._secret, "backend": backend, "timing": self._timing}
        kept["rank"] = rank
        if not issubclass(self._worker, MeshWorker):
            machine = self._worker(terms, **kept)
            return WorkerEnd(machine, member, wire, clock, compute, speak)
        kept["port"] = self._num_started
        background, dial = self._background(partial(self._to, node)), partial(self._dial, node)
        driven: Any = (wire, clock, compute, dial, background, speak)
        if issubclass(self._worker, PipelineWorker):
            assert self._run.places is not None, "a pipeline has places"
            stage = self._worker(terms, places=self._run.places, **kept)
            return PipelineEnd(stage, cast(PipelineHands, member), *driven)
        return MeshEnd(self._worker(terms, **kept), cast(MeshHands, member), *driven)

    def visit(self, guest: Guest) -> None:
        """Connect a client that is not a worker."""
        peer = next(self._numbers)
        self._guests[peer] = guest
        self.coordinator.connected(peer, self._nonce())

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule `action` for `seconds` from now."""
        self._time.later(seconds, action)

    def restart(
        self, run: Run, hands: ServerHands, *, silently: bool = False, version: int = VERSION
    ) -> None:
        """End the coordinator's process and its connections; start a new process for `run`.

        If its machine failed `silently`, workers aren't told. `version` is as for `start`.
        """
        for connection in self._connections.values():
            if connection.to is not None:
                continue
            connection.dead = True  # bytes on their way to the coordinator are lost
            if not connection.ended and not silently:
                connection.ended = True
                self._end(connection, "the coordinator died", up=False)
        self._connections.clear()
        self._guests.clear()
        self.coordinator = self._new_coordinator(run, hands)
        self.coordinator.version = version

    def _new_coordinator(self, run: Run, hands: ServerHands) -> CoordinatorEnd:
        machine = _coordinator_of(self._worker)(
            run, secret=self._secret, timing=self._timing, now=self._clock()
        )
        for background in (self._reducing, self._reading):
            background.forget()  # the previous process's work
        down, work = SimulatedWire(self._tell, self._sent_away), (self._reducing, self._reading)
        return CoordinatorEnd(machine, hands, down, self._clock, *work, notify=self._notify)

    def _clock(self) -> float:
        return self.now + self.ahead_s

    def run(self, *, until_s: float) -> do.Finish:
        """Run until the coordinator finishes; return its Finish, or a `failed` one at `until_s`."""
        while self.coordinator.finished is None and self.now <= until_s:
            self._time.next()
        ended = self.now
        while self._time.has_until(ended + FAREWELL_S):
            self._time.next()
        late = f"not finished after {ended:.0f} s of virtual time"
        return self.coordinator.finished or do.Finish("failed", late)

    # --- faults at any time -----------------------------------------------------------------------

    def kill(self, node: Node, *, silently: bool = False) -> None:
        """End a worker's process; if its machine fails `silently`, nobody notices."""
        node.alive = False
        for connection in self._connections.values():
            if node in (connection.node, connection.to) and not connection.ended:
                if silently:
                    connection.dead = True
                else:
                    self._break(connection, "the process died")

    def block(self, node: Node | None, *, out: bool, seconds: float) -> None:
        """Let nothing pass for `seconds` in one direction of a worker's or the coordinator's link.

        The other direction stays as it is: a one-way partition.
        """
        (self.card if node is None else node.card).block(out=out, until=self.now + seconds)

    # --- time -------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._time.now

    def _tick(self, tick: Callable[[], None], going: Callable[[], bool]) -> None:
        """Call `tick` every TICK_S, until `going` returns False."""

        def again() -> None:
            if going():
                tick()
                self.later(TICK_S, again)

        self.later(self._random.uniform(0, TICK_S), again)

    def _to(self, node: Node, action: Callable[[], None]) -> None:
        """Run `action` in a worker: later if the worker is frozen, not at all if it is dead."""
        if node.alive and node.frozen_until > self.now:
            self._time.at(node.frozen_until, lambda: self._to(node, action))
        elif node.alive:
            action()
            self._settle(node)

    def _settle(self, node: Node) -> None:
        """End a worker's process if its state machine is finished.

        Reconnect a disconnected worker.
        """
        if node.end.finished is not None:
            node.alive = False
        elif node.connection is None and not node.calling:
            node.calling = True
            self.later(RECONNECT_S, lambda: self._connect(node))

    def _work(self, node: Node, effect: do.Compute | do.Pass | do.Load) -> None:
        """Do the work of `effect` in a worker; it takes a random time."""

        def done() -> None:
            # A pass in a thread runs to its end, even if its round is over.
            is_wanted = node.end.wants(effect)
            outcome = node.end.work(effect) if is_wanted or isinstance(effect, do.Pass) else None
            if is_wanted:
                node.end.computed(effect, outcome)

        num_shards = len(effect.shards) if isinstance(effect, do.Compute) else 1
        takes_s = num_shards * self._random.uniform(*COMPUTING_S)
        self.later(takes_s, lambda: self._to(node, done))

    def _background(self, process: Callable[[Action], None]) -> Later:
        """Return the simulated thread in which a process reduces blocks.

        It has its own random generator, so that no other random value depends on the number of
        blocks.
        """
        drawn = random.Random(f"{self._seed} {self._num_started}")
        return Later(self._time, drawn, REDUCING_S, process)

    # --- connections ------------------------------------------------------------------------------

    def _connect(self, node: Node) -> None:
        node.calling = False
        if not node.alive or node.connection is not None:
            return
        open_at = max(node.card.blocked_until, self.card.blocked_until)
        if open_at > self.now:
            node.calling = True
            self._time.at(open_at, lambda: self._connect(node))
            return
        connection = node.connection = self._new_connection(node, None)
        node.end.connected(connection.peer, self._nonce())
        self.coordinator.connected(connection.peer, self._nonce(), HOST)

    def _dial(self, node: Node, dial: do.Dial) -> None:
        """Connect `node` to another worker: its `number` is the port in `dial`."""
        number = int(dial.address.rpartition(":")[2])
        to = next((other for other in self.nodes if other.number == number and other.alive), None)

        def connect() -> None:
            assert isinstance(node.end, MeshEnd)
            if to is None or not to.alive:
                node.end.undialable(dial, "connection refused")
                return
            if max(node.card.blocked_until, to.card.blocked_until) > self.now:
                timed_out = partial(node.end.undialable, dial, "timed out")
                self.later(self._timing.hello_s, lambda: self._to(node, timed_out))
                return
            assert isinstance(to.end, MeshEnd)
            connection = self._new_connection(node, to)
            node.end.dialed(connection.peer, dial, self._nonce())
            to.end.accepted(connection.peer, self._nonce())

        self.later(LATENCY_S[1], lambda: self._to(node, connect))

    def _new_connection(self, node: Node, to: Node | None) -> Connection:
        connection = Connection(next(self._numbers), node, to)
        self._connections[connection.peer] = connection
        return connection

    def _nonce(self) -> str:
        return self._random.randbytes(NONCE_BYTES).hex()

    def _tell(self, peer: Peer, message: Message, data: bytes) -> None:
        if peer in self._guests:
            guest = self._guests[peer]
            self.later(LATENCY_S[1], lambda: self._talk(peer, guest.heard(data), guest.pace_s))
        else:
            self._send(self._connections[peer], False, message, data)

    def _said(self, node: Node, peer: Peer, message: Message, data: bytes) -> None:
        connection = self._connections.get(peer)
        if node.alive and connection is not None:
            self._send(connection, connection.node is node, message, data)

    def _talk(self, peer: Peer, pieces: Iterable[bytes], pace_s: float | None) -> None:
        end = self.coordinator

        def arrive(piece: bytes) -> None:
            if end is self.coordinator:  # otherwise it was restarted
                feed(end, peer, piece)

        for place, piece in enumerate(pieces, start=1):
            self.later(place * (pace_s or LATENCY_S[1]), partial(arrive, piece))

    def _send(self, connection: Connection, up: bool, message: Message, data: bytes) -> None:
        """Send a message, with the fault that `meddle` returns for it.

        The fault hits the worker at the connection's end; of two workers, the sender.
        """
        if connection.dead or connection.ended:
            return
        sender = connection.end(not up)
        node = connection.node if sender is None else sender
        is_of_worker = sender is not None
        befalls = self._meddle(node.end.machine.rank, is_of_worker, message) or Meddling(None)
        half = data[: len(data) // 2]
        delay = self._random.uniform(*self._network.latency_s)
        way = connection.up if up else connection.down
        match befalls.fate:
            case Fate.KILL:
                self._deliver(connection, up, half if is_of_worker else b"", delay)
                self.kill(node)
                return
            case Fate.CUT:
                self._deliver(connection, up, half, delay)
                self._break(connection, "connection reset")
                return
            case Fate.HALF_OPEN:
                connection.dead = True
                return
            case Fate.REORDER:
                way.held += data
                return
            case Fate.FREEZE if node.frozen_until <= self.now:  # otherwise it would wake in between
                node.frozen_until = self.now + befalls.seconds
            case Fate.DELAY:
                delay += befalls.seconds
        data, way.held = bent(befalls, data, self._random) + way.held, b""
        self._deliver(connection, up, data, delay)

    def _deliver(self, connection: Connection, up: bool, data: bytes, delay: float) -> None:
        way, lane = connection.up if up else connection.down, self._card(connection, not up).out
        begins = lane.occupy(self.now, len(data), self._network.seconds(len(data)))
        way.reaches = max(way.reaches, begins + delay)
        peer, there, coordinator = connection.peer, connection.end(up), self.coordinator

        def arrive() -> None:
            if connection.dead:
                return
            if there is None:
                feed(coordinator, peer, data)
            else:
                self._to(there, lambda: feed(there.end, peer, data))

        self._reach(connection, up, way.reaches, len(data), arrive)

    def _reach(
        self, connection: Connection, up: bool, when: float, num_bytes: int, action: Action
    ) -> None:
        """Take `num_bytes` into the link of the receiver from `when` on; then run `action`."""
        way, lane = connection.up if up else connection.down, self._card(connection, up).into
        seconds = self._network.seconds(num_bytes)

        def reach() -> None:
            ends = lane.occupy(self.now, num_bytes, seconds) + seconds
            way.arrives = max(way.arrives, ends)
            if way.arrives <= self.now:
                action()
            else:
                self._time.at(way.arrives, action)

        self._time.at(when, reach)

    def _card(self, connection: Connection, up: bool) -> Card:
        """Return the link of the process that receives bytes sent `up` or down."""
        node = connection.end(up)
        return self.card if node is None else node.card

    def _break(self, connection: Connection, reason: str) -> None:
        """Break a connection; each end notices after all bytes sent to it have arrived."""
        connection.ended = True
        self._end(connection, reason, up=True)
        self._end(connection, reason, up=False)

    def _end(self, connection: Connection, reason: str, *, up: bool) -> None:
        peer, there = connection.peer, connection.end(up)

        def lose() -> None:
            if there is None:
                self.coordinator.lost(peer, reason)
            else:
                self._to(there, lambda: there.lose(connection, reason))

        way, lane = connection.up if up else connection.down, self._card(connection, not up).out
        sent = max(way.reaches, self.now, lane.blocked_until)
        self._reach(connection, up, sent + LATENCY_S[0], 0, lose)

    def _sent_away(self, peer: Peer, reason: str) -> None:
        """Close a connection for the coordinator; the worker notices after the last message."""
        if self._guests.pop(peer, None) is not None:
            return
        connection = self._connections.pop(peer)
        if not connection.ended and not connection.dead:
            connection.ended = True
            self._end(connection, f"closed by the coordinator: {reason}", up=False)

    def _closed(self, node: Node, peer: Peer, reason: str) -> None:
        """Close a connection for a worker."""
        own, connection = node.connection, self._connections.get(peer)
        if own is not None and own.peer == peer:
            node.connection, connection = None, own  # the coordinator may have closed it before
        if connection is None:
            return
        if connection.to is not None:
            del self._connections[peer]
        if not connection.ended and not connection.dead:
            connection.ended = True
            up = connection.node is node
            self._end(connection, f"closed by the worker: {reason}", up=up)


def _coordinator_of(worker: type[Worker]) -> type[Coordinator]:
    if issubclass(worker, PipelineWorker):
        return PipelineCoordinator
    return MeshCoordinator if issubclass(worker, MeshWorker) else Coordinator
