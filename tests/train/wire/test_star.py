"""Coordinator and workers of a star without I/O: legal events in any order, with losses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from entrenar_py.train.wire.attendance import THROWN_OUT_MAX
from entrenar_py.train.wire.effects import Left
from entrenar_py.train.wire.messages import (
    ALWAYS,
    MEMBERS,
    PEER_MAY_SAY,
    PEER_MOVES,
    RUN_MOVES,
    WORKER_MOVES,
    Message,
    NonFinite,
    Offer,
    PeerPhase,
    Stage,
    WorkerPhase,
)
from entrenar_py.train.wire.terms import Timing
from tests.train.wire.samples import SAMPLES
from tests.train.wire.situations import WORKERS_MAY_SAY, node, reach
from tests.train.wire.star import SECRET, Link, Star, run_of

PATIENT = Timing(heartbeat_s=5.0, dead_after_s=30.0, hello_s=10.0, gather_s=1e9)
KINDS = st.sampled_from(tuple(SAMPLES))


class Disorder(RuleBasedStateMachine):
    """Legal events in any order; `record`, `star` and `moves` assert the invariants."""

    star: Star

    @initialize(
        shards=st.integers(1, 6),
        blocks=st.integers(1, 3),
        steps=st.integers(1, 4),
        world=st.integers(1, 3),
        first=st.integers(0, 1),
        awaited=st.dictionaries(st.integers(0, 3), st.sets(st.just(0)), max_size=2),
        audited=st.lists(st.booleans(), max_size=9),
        saves=st.sets(st.integers(0, 4)),
        together=st.integers(1, 3),
        beside=st.booleans(),
        by_server=st.booleans(),
        by_speed=st.booleans(),
    )
    def begin(
        self,
        shards: int,
        blocks: int,
        steps: int,
        world: int,
        first: int,
        awaited: dict[int, set[int]],
        audited: list[bool],
        saves: set[int],
        together: int,
        beside: bool,
        by_server: bool,
        by_speed: bool,
    ) -> None:
        """Start a run of any shape, some shards audited, with its first workers together."""

        def drawn(step: int) -> list[int]:
            return [n for n in range(shards) if audited and audited[(step + n) % len(audited)]]

        run = run_of(
            num_shards=shards,
            num_blocks=blocks,
            num_steps=first + steps,
            world_size=world,
            first_step=first,
            awaited={**awaited, first: range(min(together, world))},
            audited=drawn,
            saves=saves,
            server_updates=by_server,
            by_speed=by_speed,
        )
        self.star = Star(run, timing=PATIENT, beside=beside)
        for _ in range(together):
            self.star.arrive()

    @precondition(lambda self: len(self.star.stations) < 5)
    @rule(rank=st.none() | st.integers(0, 2))
    def arrive(self, rank: int | None) -> None:
        """Add a worker that requests a rank or none; there may be more workers than ranks."""
        self.star.arrive(rank if rank is None else rank % self.star.run.world_size)

    @precondition(lambda self: bool(self.star.ready()))
    @rule(choice=st.integers(min_value=0), times=st.integers(1, 12))
    def happen(self, choice: int, times: int) -> None:
        """Do one possible action: deliver a message, or finish work."""
        for turn in range(times):
            if actions := self.star.ready():
                actions[(choice >> turn) % len(actions)]()

    @rule(rank=st.integers(0, 2))
    def go_wrong(self, rank: int) -> None:
        """Make one copy of a worker wrong, at most once, as a worker caught twice is refused."""
        self.star.record.copies.go_wrong(rank)

    @precondition(lambda self: bool(self.star.links))
    @rule(choice=st.integers(min_value=0), half=st.booleans())
    def break_off(self, choice: int, half: bool) -> None:
        """Cut a connection, or let it silently lose everything."""
        link = self._link(choice)
        if half:
            link.dead = True
        else:
            self.star.cut(link)

    @precondition(lambda self: bool(self.star.links))
    @rule()
    def break_all(self) -> None:
        """Cut all connections of the coordinator."""
        for link in list(self.star.links.values()):
            self.star.cut(link)

    @rule(choice=st.integers(min_value=0))
    def come_back(self, choice: int) -> None:
        """Reconnect a disconnected worker."""
        away = [one for one in self.star.stations if one.link is None and one.finished is None]
        if away:
            self.star.connect(away[choice % len(away)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0, 31.0]))
    def wait(self, seconds: float) -> None:
        """Advance the clock, by more than some timeouts."""
        self.star.wait(seconds)

    @precondition(lambda self: bool(self.star.links))
    @rule(choice=st.integers(min_value=0), kind=KINDS)
    def lie(self, choice: int, kind: type[Message]) -> None:
        """An illegal message ends its connection; all others stay."""
        link = self._link(choice)
        phase = self.star.coordinator.peers[link.peer].phase
        if kind in PEER_MAY_SAY[phase] or (kind in ALWAYS and phase is not PeerPhase.CHALLENGED):
            return
        others = self.star.links.keys() - {link.peer}
        self.star.say_above(link, SAMPLES[kind][0])
        assert link.peer not in self.star.links
        assert self.star.links.keys() == others or self.star.finished is not None

    @precondition(lambda self: bool(self.star.links))
    @rule(choice=st.integers(min_value=0), index=st.integers(0, 6), block=st.integers(0, 4))
    def deliver_what_is_not_owed(self, choice: int, index: int, block: int) -> None:
        """A node that is not due, or of a block that does not exist, is not added."""
        link, star = self._link(choice), self.star
        member = star.coordinator.peers[link.peer]
        owed = set(member.assigned[0]) if member.delivering else set()
        last = block == star.run.num_blocks - 1
        if index in owed - member.covered.get(block, set()) and (
            last or member.covered.get(block + 1) == owed
        ):
            return
        star.say_above(link, node(star.coordinator.step, level=0, index=index, block=block))
        assert link.peer not in star.links or star.coordinator.stage is Stage.OVER

    @invariant()
    def steps_never_go_back(self) -> None:
        """The coordinator's step follows all steps that were made, or is being made."""
        if hasattr(self, "star"):
            step, made = self.star.coordinator.step, len(self.star.record.state)
            assert made - 1 <= step <= made

    def teardown(self) -> None:
        """Without more faults the run completes; every step is made once, alike by all workers."""
        if not hasattr(self, "star"):
            return
        star = self.star
        finish = star.finish()
        if star.record.copies.undecided:
            assert finish.status == "halted"
            return
        if finish.status == "failed":  # so often that it would come back for ever
            assert f"{THROWN_OUT_MAX} times" in finish.reason, finish.reason
            return
        assert finish.status == "completed"
        every = tuple(range(star.run.num_shards))
        first = tuple((step,) for step in range(star.run.first_step))
        made = tuple((step, *every) for step in range(star.run.first_step, star.run.num_steps))
        assert star.record.state == first + made
        for station in star.stations:
            if station.finished is not None:
                assert station.finished.status == "completed"
                held = len(station.state)  # fewer than all if it waited for a place at the end
                assert station.state == star.record.state[:held]

    def _link(self, choice: int) -> Link:
        return list(self.star.links.values())[choice % len(self.star.links)]


def test_disorder() -> None:
    """Arrivals, deliveries, losses, lies and waits in any order."""
    run_state_machine_as_test(
        Disorder, settings=settings(max_examples=150, stateful_step_count=60, deadline=None)
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_a_run_in_order(num_workers: int, num_shards: int) -> None:
    """Any number of workers make the same steps; one too many is told to try again later."""
    awaited = {0: range(min(num_workers, 3))}
    star = Star(run_of(num_shards=num_shards, num_steps=3, awaited=awaited))
    for _ in range(num_workers):
        star.arrive()
    assert star.finish().status == "completed"
    assert star.record.state == tuple((step, *range(num_shards)) for step in range(3))
    ended = [one for one in star.stations if one.finished is not None]
    assert all(one.state == star.record.state for one in ended)
    assert len(ended) == min(num_workers, 3)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("phase", "others"),
    [
        (phase, others)
        for phase in WORKERS_MAY_SAY
        for others in (0, 1, 2)
        # Alone, nobody has to be waited for there.
        if others or phase not in (PeerPhase.WAITING, PeerPhase.READY, PeerPhase.STAGED)
    ],
)
def test_death_in_every_phase(phase: PeerPhase, others: int, half: bool) -> None:
    """A worker may be lost in any phase, with notice or without, and the run completes."""
    star = Star(run_of(num_steps=3))
    for _ in range(others):
        star.arrive()
    star.until(lambda: not others or star.coordinator.stage is Stage.COMPUTING)
    link = star.arrive().link
    assert link is not None
    star.until(lambda: star.coordinator.peers[link.peer].phase is phase, first=-1)
    if half:
        link.dead = True
    else:
        star.cut(link)
    assert star.finish().status == "completed"
    assert star.record.state == tuple((step, 0, 1, 2, 3) for step in range(3))
    told = [one for one in star.effects if isinstance(one, Left)]
    assert len(told) == (phase in MEMBERS), "only who took part is missed"


def test_a_step_that_one_worker_made_is_made() -> None:
    """All are lost during the commit: the step is not made again."""
    star = Star(run_of(awaited={0: (0, 1)}))
    first, second = star.arrive(), star.arrive()
    star.until(lambda: len(first.state) == 1 and len(second.state) == 1)
    star.until(lambda: len(star.record.state) == 1)
    assert star.coordinator.stage is Stage.APPLYING
    for station in (first, second):
        assert station.link is not None
        star.cut(station.link)
    assert (star.coordinator.stage, star.coordinator.step) == (Stage.GATHERING, 1)
    assert star.finish().status == "completed"


def test_a_step_that_nobody_is_known_to_have_made_is_made_again() -> None:
    """All are lost before any Applied: the step is repeated."""
    star = Star(run_of())
    station = star.arrive()
    star.until(lambda: len(station.state) == 1)
    assert station.link is not None
    star.cut(station.link)
    assert (star.coordinator.stage, star.coordinator.step) == (Stage.GATHERING, 0)
    assert star.finish().status == "completed"
    assert station.state == star.record.state == ((0, 0, 1, 2, 3), (1, 0, 1, 2, 3))


def _everything() -> list[Star]:
    """Do runs that together make every move of the tables."""
    all_there = run_of(num_blocks=2, awaited={0: (0, 1, 2)})
    stars = [Star(all_there), Star(run_of()), Star(all_there), Star(run_of()), Star(run_of())]
    serving = Star(replace(all_there, server_updates=True))
    crowded, dying, orphaned, halting, refusing = stars
    for _ in range(3):
        crowded.arrive()
    crowded.until(partial(_stands, crowded, Stage.COMPUTING))
    twin = crowded.arrive(0)  # told to come again
    crowded.until(lambda: twin.link is None, first=-1)
    crowded.finish()
    for stage in (Stage.COMPUTING, Stage.STAGING):
        link = dying.arrive().link
        assert link is not None
        dying.until(partial(_stands, dying, stage))
        dying.cut(link)
    dying.finish()
    links = [orphaned.arrive().link for _ in range(3)]
    link = links[-1]
    assert link is not None
    orphaned.until(partial(_stands, orphaned, Stage.COMPUTING))
    orphaned.cut(link)  # its shards go to the others, who have some
    orphaned.finish()
    station = halting.arrive()
    halting.until(lambda: bool(station.jobs))
    halting.work(station, NonFinite(step=0, shard=0, tensor="w", element=1, loss=1.0, ids=(1,)))
    refusing.arrive(secret=SECRET + b"!")
    for stage in (Stage.COMPUTING, Stage.STAGING, Stage.APPLYING):
        stopped = Star(run_of())
        stopped.arrive()
        stopped.until(partial(_stands, stopped, stage))
        stopped.stop("asked to", at_once=True)
        stars.append(stopped)
    for phase in (PeerPhase.READY, PeerPhase.COMPUTING, PeerPhase.STAGED):
        breaking, link = reach(phase)
        breaking.say_above(link, Offer(heartbeat_s=1.0, dead_after_s=2.0, package=None, proof=""))
        breaking.finish()
        stars.append(breaking)
    for _ in range(3):
        serving.arrive()
    serving.finish()
    for star in (*stars, serving):
        star.deliver()
    return [*stars, serving]


def _stands(star: Star, stage: Stage) -> bool:
    return star.coordinator.stage is stage


def test_every_move_of_the_tables_is_made() -> None:
    """The tables have no move that never happens.

    `moves` checks in every test that no other move happens.
    """
    stars = _everything()
    made = {move for star in stars for link in star.all_links for move in link.follower.taken}
    assert made == set(PEER_MOVES)
    stages = {move for star in stars for move in star.record.moves}
    assert stages == {(before, after) for before, _, after in RUN_MOVES}
    ended = {move for move in WORKER_MOVES if move[2] is WorkerPhase.OVER}
    taken = {move for star in stars for one in star.stations for move in one.follower.taken}
    assert taken - ended == set(WORKER_MOVES) - ended
