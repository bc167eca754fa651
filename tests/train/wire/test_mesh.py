"""Coordinator and workers of a mesh without I/O: legal events in any order, with losses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from entrenar_py.train.wire.effects import Finish, Keep, Send
from entrenar_py.train.wire.messages import (
    Applied,
    Average,
    Group,
    Heartbeat,
    Message,
    Stage,
    TreeNode,
)
from tests.train.wire.mesh import Mesh
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import run_of
from tests.train.wire.stations import NOTHING, Station, Wire
from tests.train.wire.test_star import PATIENT

KINDS = st.sampled_from(tuple(SAMPLES))
GONE = "no worker is left that holds the state before step"


class Disorder(RuleBasedStateMachine):
    """Legal events in any order; `mesh` asserts the invariants."""

    mesh: Mesh

    @initialize(
        shards=st.integers(1, 6),
        blocks=st.integers(1, 4),
        steps=st.integers(1, 4),
        world=st.integers(1, 4),
        first=st.integers(0, 1),
        saves=st.sets(st.integers(1, 3)),
        num_workers=st.integers(1, 4),
        by_speed=st.booleans(),
    )
    def begin(
        self,
        shards: int,
        blocks: int,
        steps: int,
        world: int,
        first: int,
        saves: set[int],
        num_workers: int,
        by_speed: bool,
    ) -> None:
        """Start a run of any shape, with its first workers."""
        run = run_of(
            num_shards=shards,
            num_blocks=blocks,
            num_steps=first + steps,
            world_size=world,
            first_step=first,
            saves=saves,
            by_speed=by_speed,
        )
        self.mesh = Mesh(run, timing=PATIENT)
        for _ in range(num_workers):
            self.mesh.arrive()

    @precondition(lambda self: len(self.mesh.stations) < 6)
    @rule(rank=st.none() | st.integers(0, 3))
    def arrive(self, rank: int | None) -> None:
        """Add a worker that requests a rank or none; there may be more workers than ranks."""
        self.mesh.arrive(rank if rank is None else rank % self.mesh.run.world_size)

    @precondition(lambda self: bool(self.mesh.ready()))
    @rule(choice=st.integers(min_value=0), times=st.integers(1, 30))
    def happen(self, choice: int, times: int) -> None:
        """Do one possible action: deliver a message, finish work, or answer a dial."""
        for turn in range(times):
            if actions := self.mesh.ready():
                actions[(choice >> turn) % len(actions)]()

    @precondition(lambda self: bool(self._open()))
    @rule(choice=st.integers(min_value=0), half=st.booleans())
    def break_off(self, choice: int, half: bool) -> None:
        """Cut a connection, or let it silently lose everything."""
        wire = self._open()[choice % len(self._open())]
        if half:
            wire.dead = True
        else:
            self.mesh.cut(wire)

    @rule(choice=st.integers(min_value=0))
    def come_back(self, choice: int) -> None:
        """Reconnect a disconnected worker."""
        away = [one for one in self.mesh.stations if one.wire is None and one.finished is None]
        if away:
            self.mesh.connect(away[choice % len(away)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0, 31.0]))
    def wait(self, seconds: float) -> None:
        """Advance the clock, by more than some timeouts."""
        self.mesh.wait(seconds)

    @precondition(lambda self: bool(self._links()))
    @rule(choice=st.integers(min_value=0), kind=KINDS)
    def lie(self, choice: int, kind: type[Message]) -> None:
        """An illegal message between workers ends that link at most."""
        wire = self._links()[choice % len(self._links())]
        assert wire.to is not None
        there = set(self.mesh.coordinator.peers)
        wire.queues[wire.to].clear()  # it says nothing else: this is what comes next
        wire.queues[wire.to].append((SAMPLES[kind][0], NOTHING))
        self.mesh.hear(wire, wire.to)
        assert wire.to in wire.closed or issubclass(kind, TreeNode | Average | Heartbeat)
        assert set(self.mesh.coordinator.peers) == there

    def teardown(self) -> None:
        """Without more faults the run completes; every step is made once, alike by all workers."""
        if not hasattr(self, "mesh"):
            return
        mesh = self.mesh
        finish = mesh.finish()
        if finish.status == "failed":
            assert finish.reason.startswith(GONE)
            assert mesh.all_lost
            return
        assert finish.status == "completed"
        for station in mesh.stations:
            assert station.state == tuple(range(len(station.state)))
            if station.finished is not None and station.state:
                assert station.finished.status == "completed"

    def _open(self) -> list[Wire]:
        return [one for one in self.mesh.wires if not one.dead and not one.closed]

    def _links(self) -> list[Wire]:
        """Return the ready links between workers."""
        return [one for one in self._open() if one.to is not None and _is_ready(one)]


def _is_ready(wire: Wire) -> bool:
    assert wire.to is not None
    ends = (wire.maker.machine.links, wire.to.machine.links)
    return all(one.rank_of(wire.peer) is not None for one in ends)


def test_disorder() -> None:
    """Arrivals, deliveries, losses, lies and waits in any order."""
    run_state_machine_as_test(
        Disorder, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_shards", "num_blocks"), [(1, 1), (4, 2), (7, 1), (7, 5)])
def test_a_run_in_order(num_workers: int, num_shards: int, num_blocks: int) -> None:
    """Any number of workers make the same steps in one round, even with fewer shards or blocks."""
    run = run_of(
        world_size=num_workers,
        num_shards=num_shards,
        num_blocks=num_blocks,
        num_steps=3,
        awaited={0: range(num_workers)},
    )
    mesh = Mesh(run)
    for rank in range(num_workers):
        mesh.arrive(rank)
    assert mesh.finish() == Finish("completed")
    assert [one.state for one in mesh.stations] == [(0, 1, 2)] * num_workers
    assert {one.round for one in groups(mesh)} == {1}


def groups(mesh: Mesh) -> list[Group]:
    """Return every Group message that was sent."""
    told = [one.message for one in mesh.effects if isinstance(one, Send)]
    return [one for one in told if isinstance(one, Group)]


def started(num_workers: int = 3, **changes: object) -> tuple[Mesh, list[Station]]:
    """Return a mesh whose workers compute the first step."""
    run = run_of(**{"num_blocks": 3, "awaited": {0: range(num_workers)}, **changes})
    mesh = Mesh(run)
    stations = [mesh.arrive(rank) for rank in range(num_workers)]
    mesh.until(lambda: mesh.coordinator.stage is Stage.COMPUTING)
    return mesh, stations


def wire_of(station: Station) -> Wire:
    """Return the connection of a worker to the coordinator."""
    assert station.wire is not None
    return station.wire


def test_all_are_cut_off_at_once() -> None:
    """The workers reconnect at any point of a step, and the run continues from their state."""
    for num_moves in range(60):
        mesh, stations = started(2)
        mesh.until(lambda mesh=mesh: mesh.coordinator.step == 1)  # type: ignore[misc]
        for _ in range(num_moves):
            (mesh.ready() or [lambda: None])[0]()
        for station in stations:
            if station.wire is not None:
                mesh.cut(station.wire)
        assert mesh.finish() == Finish("completed")


def test_all_have_made_the_step_and_are_cut_off() -> None:
    """The first worker to reconnect reports the step, and the next one follows."""
    mesh, stations = started(2)
    mesh.until(lambda: (mesh.coordinator.step, mesh.coordinator.stage) == (1, Stage.APPLYING))
    for station in stations:
        while len(station.state) < 2:
            mesh.hear(wire_of(station), station)
    for station in stations:
        mesh.cut(wire_of(station))
    told = len(mesh.effects)
    mesh.connect(stations[0])
    mesh.until(lambda: mesh.coordinator.step == 2)
    kept = [one.message for one in mesh.effects[told:] if isinstance(one, Keep)]
    assert kept == [Applied(step=1)]
    assert mesh.finish() == Finish("completed")


def test_all_is_lost_with_the_last() -> None:
    """The run fails with that reason if new workers replace all lost ones."""
    mesh, stations = started(2)
    mesh.until(lambda: mesh.coordinator.step == 1)
    for station in stations:
        station.finished = Finish("failed", "killed")
        mesh.cut(wire_of(station))
    assert mesh.finished is None
    for rank in range(2):
        mesh.arrive(rank)
    mesh.deliver()
    reason = f"{GONE} 1: go on from the last checkpoint"
    assert mesh.finished == Finish("failed", reason)


def test_nobody_comes_back() -> None:
    """The run fails after `gather_s`, and says that the state is lost."""
    mesh, stations = started(2)
    mesh.until(lambda: mesh.coordinator.step == 1)
    for station in stations:
        station.finished = Finish("failed", "killed")
        mesh.cut(wire_of(station))
    mesh.wait(PATIENT.gather_s)
    assert mesh.finished == Finish("failed", f"{GONE} 1: go on from the last checkpoint")


def test_the_first_step_is_never_lost() -> None:
    """The coordinator still has the initial state, so new workers can start from it."""
    mesh, stations = started(2)
    for station in stations:
        mesh.cut(wire_of(station))
    assert mesh.finish() == Finish("completed")


@pytest.mark.parametrize("half", [False, True])
def test_two_who_can_t_reach_each_other(half: bool) -> None:
    """The step starts again in a new round with a new link; no worker is dropped."""
    mesh, stations = started()
    mesh.until(lambda: any(one.to is stations[1] and one.queues[stations[1]] for one in mesh.wires))
    (link,) = [one for one in mesh.wires if one.maker is stations[0] and one.to is stations[1]]
    if half:
        link.dead = True
    else:
        mesh.cut(link)
    assert mesh.finish() == Finish("completed")
    assert [one.state for one in mesh.stations] == [(0, 1)] * 3
    assert {one.round for one in groups(mesh)} > {1}
    assert all(set(one.ranks) == {0, 1, 2} for one in groups(mesh))
