"""A mesh of machines without bytes, clock or sockets; `stations` defines the payloads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import (
    MEMBERS,
    Average,
    Commit,
    Message,
    State,
    TreeNode,
    Welcome,
)
from entrenar_py.train.wire.terms import Run, Timing
from tests.train.wire.record import nodes, under
from tests.train.wire.star import SECRET, TERMS, TIMING
from tests.train.wire.stations import NOTHING, Payload, Said, Station, Wire


class Mesh:
    """One coordinator, any number of workers, and a clock that `wait` advances."""

    def __init__(self, run: Run, *, timing: Timing = TIMING, host: str = "host") -> None:
        self.run, self.timing, self.now = run, timing, 0.0
        self._host = host  # where all workers are
        self.coordinator = MeshCoordinator(run, secret=SECRET, timing=timing, now=0.0)
        self.stations: list[Station] = []
        self.wires: list[Wire] = []
        self.dials: list[tuple[Station, do.Dial]] = []
        self.stored: Payload = tuple(range(run.first_step))  # the state that the coordinator has
        self.effects: list[Effect] = []  # all of the coordinator's
        self.finished: do.Finish | None = None
        self.all_lost = False  # at some time, after somebody took part
        self._peers = count()

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, rank: int | None = None) -> Station:
        """Add a worker, which connects."""
        number = len(self.stations)
        machine = MeshWorker(
            TERMS, secret=SECRET, backend="cpu", rank=rank, port=number, timing=self.timing
        )
        self.stations.append(Station(machine, number))
        self.connect(self.stations[-1])
        return self.stations[-1]

    def connect(self, station: Station) -> None:
        """Connect a worker to the coordinator again."""
        wire = station.wire = self._wire(station, None)
        peer = wire.peer
        self._below(station, station.machine.connected(peer, self._nonce(), self.now))
        self._above(self.coordinator.connected(peer, self._nonce(), self.now, self._host))

    def answer(self, station: Station, dial: do.Dial) -> None:
        """Answer a dial: connect to the worker at the address, or refuse if that has finished."""
        self.dials.remove((station, dial))
        to = self.stations[int(dial.address.rpartition(":")[2])]
        if to.finished is not None:
            self._below(station, station.machine.undialable(dial, "refused"))
            return
        peer = self._wire(station, to).peer
        self._below(station, station.machine.links.dialed(peer, dial, self._nonce(), self.now))
        self._below(to, to.machine.links.accepted(peer, self._nonce(), self.now))

    def hear(self, wire: Wire, end: Station | None) -> None:
        """Deliver the next message on its way to `end`, or the close of the other end."""
        if not wire.queues[end]:
            self._lose(wire, end, "closed by the other")
            return
        said = wire.queues[end].popleft()
        if end is None:
            self.say_above(wire, *said)
        elif wire.to is None:
            self._below(end, end.machine.receive(said[0], self.now), said)
        else:
            self._below(end, end.machine.receive_from(wire.peer, said[0], self.now), said)

    def say_above(self, wire: Wire, message: Message, payload: Payload = NOTHING) -> None:
        """Deliver a message to the coordinator, from an honest worker or not."""
        effects = self.coordinator.receive(wire.peer, message, self.now)
        self._above(effects, (message, payload))

    def work(self, station: Station) -> None:
        """Finish the first computation of a worker."""
        asked = station.jobs.popleft()
        self._below(station, station.machine.computed(asked, nodes(self.run, asked)))

    def cut(self, wire: Wire) -> None:
        """Break a connection: messages on their way are lost, and both ends notice."""
        for end, queue in wire.queues.items():
            queue.clear()
            self._lose(wire, end, "cut")

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the run from outside."""
        self._above(self.coordinator.stop(reason, self.now, at_once=at_once))

    def wait(self, seconds: float) -> None:
        """Advance the clock, and tick every machine."""
        self.now += seconds
        self._above(self.coordinator.tick(self.now))
        for station in self.stations:
            self._below(station, station.machine.tick(self.now))

    # --- a fair world -----------------------------------------------------------------------------

    def ready(self) -> list[Callable[[], None]]:
        """Return the possible next actions: hear a message or an end, finish work or a dial."""
        actions: list[Callable[[], None]] = [partial(self.answer, *dial) for dial in self.dials]
        actions += [partial(self.work, station) for station in self.stations if station.jobs]
        for wire in self.wires:
            for end, queue in wire.queues.items():
                if not wire.dead and end not in wire.closed and (queue or wire.closed):
                    actions.append(partial(self.hear, wire, end))
        return actions

    def until(self, holds: Callable[[], bool]) -> None:
        """Do possible actions, one at a time, until `holds` returns True."""
        while not holds():
            actions = self.ready()
            assert actions, "nothing more would happen"
            actions[0]()

    def deliver(self) -> None:
        """Do possible actions until there are none."""
        while actions := self.ready():
            actions[0]()

    def finish(self, *, within_s: float = 600.0) -> do.Finish:
        """Deliver all, reconnect workers, add those that are awaited, until the run ends."""
        until = self.now + within_s
        self.deliver()
        while self.finished is None:
            assert self.now < until, f"no end after {within_s} s, {self.coordinator.stage}"
            there = {one.machine.rank for one in self.stations if one.finished is None}
            for ranks in self.run.awaited.values():
                for rank in set(ranks) - there:
                    self.arrive(rank)
                    there.add(rank)
            if not there:
                self.arrive()
            for station in self.stations:
                if station.wire is None and station.finished is None:
                    self.connect(station)
            self.deliver()
            self.wait(1.0)
        self.deliver()
        return self.finished

    # --- what the machines want done --------------------------------------------------------------

    def _above(self, effects: Iterable[Effect], said: Said | None = None) -> None:
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case do.Send(peer, message):
                    wire = self._wire_of(peer)
                    wire.queues[wire.maker].append((message, self._carried(wire, message)))
                case do.Close(peer):
                    self._close(self._wire_of(peer), None)
                case do.Keep(_, State(step=step)):
                    assert said is not None
                    self.stored = said[1]
                    assert len(self.stored) == step, "it is the state before its step"
                case do.Save(step):
                    assert len(self.stored) == step, "what is saved is here"
                    self._above(self.coordinator.saved(self.now))
                case do.Finish():
                    assert self.finished is None, "a run ends once"
                    self.finished = effect
        members = [one for one in self.coordinator.peers.values() if one.phase in MEMBERS]
        self.all_lost |= not members and any(isinstance(one, do.Left) for one in self.effects)

    def _carried(self, wire: Wire, message: Message) -> Payload:
        """Return the payload of a coordinator's message; all hold a step before its commit."""
        if isinstance(message, Welcome):
            assert len(self.stored) == message.step, "the state is that before the step"
            return self.stored
        if isinstance(message, Commit) and wire.maker.wire is wire:
            assert wire.maker.held == self._blocks(), "it holds all of it"
        return NOTHING

    def _below(self, station: Station, effects: Iterable[Effect], said: Said | None = None) -> None:
        waiting = deque((effect, said) for effect in effects)
        while waiting:
            waiting.extend(self._one_below(station, *waiting.popleft()))

    def _one_below(
        self, station: Station, effect: Effect, said: Said | None
    ) -> list[tuple[Effect, Said | None]]:
        match effect:
            case do.Send(peer, message):
                self._say(station, self._wire_of(peer), message)
            case do.Close(peer):
                self._close(self._wire_of(peer), station)
            case do.Dial():
                self.dials.append((station, effect))
            case do.Compute():
                station.jobs.append(effect)
            case do.Contribute(node):
                station.sums.setdefault(node.block, []).extend(under(self.run, node))
            case do.Keep(_, TreeNode(block=block)):
                assert said is not None
                station.sums.setdefault(block, []).extend(said[1])
            case do.Reduce(step, block):
                return [(one, None) for one in self._reduced(station, step, block)]
            case do.Regroup(_):
                station.sums.clear()
                station.held.clear()
            case do.Postpone(peer):
                assert said is not None
                station.postponed.append((peer, said))
            case do.Again():
                return self._again(station)
            case _:
                self._stand(station, effect, said)
        return []

    def _stand(self, station: Station, effect: Effect, said: Said | None) -> None:
        """Carry out an effect on a worker's state."""
        match effect:
            case do.Load(_, step):
                assert said is not None
                assert len(said[1]) == step, "the state is that before its step"
                station.state = said[1]
            case do.Hold(step, block):
                assert said is not None
                assert said[1] == (step,), "what is held is of its step"
                station.held.add(block)
            case do.Make(step):
                assert step == len(station.state), "no step is skipped or made twice"
                assert station.held == self._blocks(), "all of it is there"
                station.state += (step,)
            case do.Finish():
                station.finished = effect

    def _reduced(self, station: Station, step: int, block: int) -> list[Effect]:
        came = station.sums.pop(block)
        assert sorted(came) == list(range(self.run.num_shards)), "every shard, and each once"
        station.held.add(block)
        return station.machine.reduced(step, block, 1.0, 1.0)

    def _again(self, station: Station) -> list[tuple[Effect, Said | None]]:
        told, station.postponed = station.postponed, []
        return [
            (effect, said)
            for peer, said in told
            for effect in station.machine.receive_from(peer, said[0], self.now)
        ]

    def _say(self, station: Station, wire: Wire, message: Message) -> None:
        payload = NOTHING
        if isinstance(message, TreeNode):
            payload = tuple(under(self.run, message))
        elif isinstance(message, Average):
            payload = (message.step,)
        elif isinstance(message, State):
            payload = station.state
        other = wire.to if wire.maker is station else wire.maker
        wire.queues[other].append((message, payload))

    # --- connections ------------------------------------------------------------------------------

    def _wire(self, maker: Station, to: Station | None) -> Wire:
        self.wires.append(Wire(next(self._peers), maker, to, {maker: deque(), to: deque()}))
        return self.wires[-1]

    def _wire_of(self, peer: do.Peer) -> Wire:
        return next(wire for wire in self.wires if wire.peer == peer)

    def _close(self, wire: Wire, end: Station | None) -> None:
        """`end` says and hears nothing more on `wire`."""
        wire.closed.add(end)
        if end is not None and end.wire is wire:
            end.wire = None
            end.jobs.clear()

    def _lose(self, wire: Wire, end: Station | None, reason: str) -> None:
        if end in wire.closed:
            return
        if end is None:
            self._above(self.coordinator.lost(wire.peer, reason, self.now))
        elif wire.to is None:
            self._below(end, end.machine.lost(reason))
        else:
            self._below(end, end.machine.lost_link(wire.peer, reason))
        self._close(wire, end)

    def _blocks(self) -> set[int]:
        return set(range(self.run.num_blocks))

    def _nonce(self) -> str:
        return f"{next(self._peers):032x}"
