"""A star of bare machines: messages pass from hand to hand; no bytes, no clock, no socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    PEER_MOVES,
    WORKER_MOVES,
    Hello,
    Leave,
    Message,
    NonFinite,
    PeerPhase,
    Stage,
    Staged,
    WorkerPhase,
)
from entrenar_py.train.wire.terms import Run, Terms, Timing
from entrenar_py.train.wire.worker import Worker
from tests.train.wire.moves import Follower
from tests.train.wire.record import Payload, Record, nodes

TERMS = Terms(run="r", manifest="m", data="d")
TIMING = Timing(heartbeat_s=5.0, dead_after_s=30.0, hello_s=10.0, gather_s=300.0)
SECRET = b"open sesame"


def run_of(**changes: Any) -> Run:
    """A run of two steps over four shards in one block, by at most three workers."""
    usual: dict[str, Any] = {"world_size": 3, "num_shards": 4, "num_steps": 2, "num_blocks": 1}
    return Run(terms=TERMS, **{**usual, **changes})


def closes(effects: Iterable[Effect], link: Link) -> bool:
    """Return whether these effects end `link`."""
    return any(isinstance(one, do.Close) and one.peer == link.peer for one in effects)


def closing(effects: Iterable[Effect]) -> do.Close:
    """Return the first of `effects` that closes a connection."""
    return next(one for one in effects if isinstance(one, do.Close))


@dataclass(eq=False)
class Link:
    """A connection; `up` and `down` hold messages on their way. `dead`: half open, all is lost."""

    peer: int
    station: Station
    follower: Follower[PeerPhase]
    up: deque[Message] = field(default_factory=deque)
    down: deque[tuple[Message, Payload]] = field(default_factory=deque)
    dead: bool = False
    ended_above: bool = False  # by the coordinator
    ended_below: bool = False


@dataclass(eq=False)
class Station:
    """A worker and its state: the averages of the steps that it made, or that it was given."""

    machine: Worker
    follower: Follower[WorkerPhase]
    link: Link | None = None
    state: Payload = ()
    held: dict[int, Payload] = field(default_factory=dict)  # block -> what was added
    jobs: deque[do.Compute] = field(default_factory=deque)
    finished: do.Finish | None = None


class Star:
    """One coordinator, any number of workers, and a clock that `wait` advances.

    Blocks are averaged, steps prepared and states saved at once, or, with `beside`, when `reduce`
    is called.
    """

    def __init__(self, run: Run, *, timing: Timing = TIMING, beside: bool = False) -> None:
        self.run, self.timing = run, timing
        self.now = 0.0
        self.coordinator = Coordinator(run, secret=SECRET, timing=timing, now=0.0)
        self.record = Record(run)
        self.stations: list[Station] = []
        self.links: dict[do.Peer, Link] = {}  # those that the coordinator has
        self.all_links: list[Link] = []
        self.effects: list[Effect] = []  # all of the coordinator's
        self.finished: do.Finish | None = None
        self.reducing: deque[do.Reduce | do.Prepare | do.Save] = deque()
        self._beside = beside
        self._peers = count()

    # --- what happens -----------------------------------------------------------------------------

    def arrive(
        self, rank: int | None = None, *, secret: bytes = SECRET, backend: str = "cpu"
    ) -> Station:
        """Add a worker, which connects."""
        machine = Worker(TERMS, secret=secret, backend=backend, rank=rank, timing=self.timing)
        station = Station(machine, Follower(WORKER_MOVES, WorkerPhase.CONNECTED))
        self.stations.append(station)
        self.connect(station)
        return station

    def connect(self, station: Station) -> Link:
        """Connect a disconnected worker."""
        assert station.link is None
        peer = next(self._peers)
        link = Link(peer, station, Follower(PEER_MOVES, PeerPhase.CHALLENGED))
        station.link = self.links[peer] = link
        self.all_links.append(link)
        station.follower.places = {WorkerPhase.CONNECTED}
        self._below(station, station.machine.connected(peer, f"{peer:032x}", self.now))
        self._above(self.coordinator.connected(peer, f"{peer + 2**32:032x}", self.now))
        return link

    def hear_above(self, link: Link) -> None:
        """Deliver an honest worker's next message to the coordinator, or the loss of its link."""
        if not link.up:
            self._lose_above(link, "closed by the worker")
            return
        message = link.up.popleft()
        effects = self.say_above(link, message)
        may_go = isinstance(message, Hello | Leave) or self.finished is not None
        assert may_go or not closes(effects, link), f"{message} of an honest worker: {effects}"

    def say_above(self, link: Link, message: Message) -> list[Effect]:
        """Deliver any message to the coordinator, legal or not; return its effects."""
        effects = self.coordinator.receive(link.peer, message, self.now)
        if not closes(effects, link):
            link.follower.passed(message)
            if isinstance(message, Staged):
                self.record.staged.add(link.peer)
        self._above(effects)
        return effects

    def hear_below(self, link: Link) -> None:
        """Deliver the next message of a link to its worker, or the loss of the link."""
        if not link.down:
            self._lose_below(link, "closed by the coordinator")
            return
        message, payload = link.down.popleft()
        station = link.station
        station.follower.passed(message)
        self._below(station, station.machine.receive(message, self.now), payload)

    def work(self, station: Station, outcome: NonFinite | None = None) -> None:
        """Finish the first computation of a worker, with the tree nodes or with `outcome`."""
        asked = station.jobs.popleft()
        said = nodes(self.run, asked) if outcome is None else outcome
        self._below(station, station.machine.computed(asked, said))

    def reduce(self) -> None:
        """Finish the first reduction, preparation or save in progress."""
        self._above(self._reduced(self.reducing.popleft()))

    def _reduced(self, asked: do.Reduce | do.Prepare | do.Save) -> list[Effect]:
        if isinstance(asked, do.Save):
            self.record.save(asked.step, self.coordinator.stage)
            return self.coordinator.saved(self.now)
        if isinstance(asked, do.Prepare):
            return self.coordinator.prepared(asked.step, 1.0, 1.0, self.now)
        return self.coordinator.reduced(asked.step, asked.block, 1.0, 1.0, self.now)

    def cut(self, link: Link) -> None:
        """Break a connection: messages on their way are lost, and both ends notice."""
        link.up.clear()
        link.down.clear()
        self._lose_below(link, "cut")
        self._lose_above(link, "cut")

    def wait(self, seconds: float) -> None:
        """Advance the clock, and tick every machine."""
        self.now += seconds
        self._above(self.coordinator.tick(self.now))
        for station in self.stations:
            self._below(station, station.machine.tick(self.now))

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the run from outside."""
        effects = self.coordinator.stop(reason, self.now, at_once=at_once)
        if self.coordinator.stage is Stage.OVER:  # perhaps without an effect, if a save goes on
            self.record.enter(Stage.OVER)
        self._above(effects)

    # --- a fair world -----------------------------------------------------------------------------

    def ready(self) -> list[Callable[[], None]]:
        """Return the possible next actions: hear a message or an end, or finish work."""
        actions: list[Callable[[], None]] = [self.reduce] if self.reducing else []
        for link in self.links.values():
            if not link.dead and (link.up or link.ended_below):
                actions.append(partial(self.hear_above, link))
        for station in self.stations:
            here = station.link
            if here is not None and not here.dead and (here.down or here.ended_above):
                actions.append(partial(self.hear_below, here))
            if station.jobs:
                actions.append(partial(self.work, station))
        return actions

    def until(self, holds: Callable[[], bool], *, first: int = 0) -> None:
        """Do possible actions, one at a time, until `holds`; `first` picks the action: 0 or -1."""
        while not holds():
            actions = self.ready()
            assert actions, "nothing more would happen"
            actions[first]()

    def deliver(self) -> None:
        """Do possible actions until there are none."""
        while actions := self.ready():
            actions[0]()

    def finish(self, *, within_s: float = 600.0) -> do.Finish:
        """Deliver all, reconnect workers, add those that are awaited, until the run ends."""
        until = self.now + within_s
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
                if station.link is None and station.finished is None:
                    self.connect(station)
            self.deliver()
            self.wait(1.0)
        self.deliver()
        return self.finished

    # --- what the machines want done --------------------------------------------------------------

    def _above(self, effects: Iterable[Effect]) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            self.effects.append(effect)
            waiting.extend(self._one_above(effect))
        for peer, member in self.coordinator.peers.items():
            self.links[peer].follower.stands(member.phase)
        assert self.record.stage is self.coordinator.stage

    def _one_above(self, effect: Effect) -> list[Effect]:
        record = self.record
        match effect:
            case do.Send(peer, message):
                link = self.links[peer]
                payload = record.payload(peer, message, self.coordinator)
                link.follower.passed(message)
                if not link.dead:
                    link.down.append((message, payload))
            case do.Close(peer):
                self.links.pop(peer).ended_above = True
            case do.Keep(rank, message):
                record.keep(rank, message)
            case do.Left(rank):
                record.left(rank)
            case do.Gather(step):
                self.reducing.clear()  # nobody hears of it any more
                record.gather(step)
            case do.Deliver(rank):
                record.deliver(rank)
            case do.Copy(rank, message):
                record.copies.take(rank, message)
            case do.EndCopy(rank, shard):
                record.copies.end(rank, shard, self.run.num_blocks)
            case do.Compare(step, shard):
                ranks, alike = record.copies.compare(shard)
                return self.coordinator.compared(step, shard, ranks, alike, self.now)
            case do.Conclude():
                record.conclude(effect)
            case do.Reduce() | do.Prepare() | do.Save():
                if isinstance(effect, do.Reduce):
                    record.reduce(effect.step, effect.block)
                elif isinstance(effect, do.Prepare):
                    record.prepare(effect.step)
                else:
                    record.save(effect.step, self.coordinator.stage)
                if self._beside:
                    self.reducing.append(effect)
                    return []
                return self._reduced(effect)
            case do.Apply(step):
                record.apply(step)
            case do.Finish():
                assert self.finished is None, "a run ends once"
                self.reducing.clear()
                record.enter(Stage.OVER)
                self.finished = effect
        return []

    def _below(self, station: Station, effects: Iterable[Effect], payload: Payload = ()) -> None:
        for effect in effects:
            self._one_below(station, effect, payload)
        phase = station.machine.phase
        if phase is not WorkerPhase.AWAY or phase in station.follower.places:
            station.follower.stands(phase)

    def _one_below(self, station: Station, effect: Effect, payload: Payload) -> None:
        if isinstance(effect, do.Finish):
            station.finished = effect
            return  # its link is closed by then
        link = station.link
        assert link is not None, "a worker that is away does nothing"
        match effect:
            case do.Send(_, message):
                station.follower.passed(message)
                if isinstance(message, Staged):
                    assert station.held.keys() == set(range(self.run.num_blocks))
                if not link.dead:
                    link.up.append(message)
            case do.Close():
                link.ended_below, station.link = True, None
                station.jobs.clear()
            case do.Load(_, step):
                assert step == len(payload), "the state is that before its step"
                station.state = payload
                station.held.clear()
            case do.Compute():
                station.jobs.append(effect)
            case do.Hold(step, block):
                *added, of_block = payload
                assert (step, block) == (added[0], of_block), "what is held is of its step"
                assert block not in station.held
                station.held[block] = tuple(added)
            case do.Make(step):
                assert step == len(station.state), "no step is skipped or made twice"
                (added_in_all,) = set(station.held.values())
                station.state += (added_in_all,)
                station.held.clear()

    def _lose_above(self, link: Link, reason: str) -> None:
        self._above(self.coordinator.lost(link.peer, reason, self.now))
        self.links.pop(link.peer, None)

    def _lose_below(self, link: Link, reason: str) -> None:
        if link.station.link is link:
            self._below(link.station, link.station.machine.lost(reason))
