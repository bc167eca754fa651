"""The parameter server in virtual time has the reference's bits under every fault."""

from __future__ import annotations

import pytest

from entrenar_py.shared import faults
from entrenar_py.shared.faults import PLACES, Fault
from entrenar_py.shared.trace import Admission, Halt, Injected, Shard, Update
from tests.systems import stars
from tests.systems.between import Between
from tests.systems.stars import SIMULATED, subject

# Virtual seconds: within the timeouts of both ends, and beyond them.
SHORT_S, LONG_S = 1.0, 40.0
BREAKS = ("kill", "cut", "half_open", "duplicate", "reorder", "truncate", "flip")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_any_number_of_workers_gives_the_reference(workload: str, world_size: int) -> None:
    """The weights after every step are those of the reference."""
    stars.require_right(subject(SIMULATED, workload=workload, world_size=world_size))


@pytest.mark.parametrize(("kind", "at"), stars.spread(BREAKS, PLACES))
def test_what_breaks_a_connection(kind: str, at: str) -> None:
    """The worker is given up and comes back with the whole state, and no bit changes."""
    stars.require_back(stars.require_right(stars.struck(SIMULATED, kind, at)))


@pytest.mark.parametrize(("kind", "at"), stars.spread(["freeze", "delay"], PLACES))
def test_what_takes_time(kind: str, at: str) -> None:
    """A short delay is waited for; after a long one the worker is given up and comes back."""
    assert stars.changes(stars.require_right(stars.struck(SIMULATED, kind, at, SHORT_S))) == []
    stars.require_back(stars.require_right(stars.struck(SIMULATED, kind, at, LONG_S)))


@pytest.mark.parametrize("block_bytes", [40, 100, 604])
def test_blocks_of_any_size_give_the_reference(block_bytes: int) -> None:
    """The bits are equal for any size of blocks, even if a worker is lost between two."""
    fault = Fault(kind="duplicate", step=stars.STEP, rank=1, at="TreeNode")
    stars.require_right(stars.in_blocks(SIMULATED, block_bytes, faults=(fault,)))


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize(("kind", "at"), stars.spread(BREAKS, ["TreeNode", "Average"]))
def test_what_breaks_a_connection_between_blocks(kind: str, at: str, block: int) -> None:
    """Block 3 of four goes first: averaged blocks stay, and every bit is right."""
    fault = Fault(kind=kind, step=stars.STEP, rank=1, at=at)
    scenario = stars.in_blocks(SIMULATED, 160, faults=(fault,))
    trace = Between(scenario, block).train()
    assert stars.held(trace) == stars.expected(scenario)
    assert [event.fault for event in trace.of(Injected)] == [fault.to_dict()]
    assert (stars.STEP, 1, "left") in stars.changes(trace)
    assert (stars.STEP + 1, 1, "joined") in stars.changes(trace)


@pytest.mark.parametrize(("value", "at"), stars.LIES)
def test_who_lies_is_given_up(value: str, at: str) -> None:
    """The worker comes back, others compute its shards, and no bit changes."""
    stars.require_back(stars.require_right(stars.lying(SIMULATED, value, at)))


@pytest.mark.parametrize("value", faults.STRANGERS)
def test_strangers_are_turned_away(value: str) -> None:
    """Strangers of every kind do not affect the run."""
    stars.require_turned_away(stars.require_right(stars.visited(SIMULATED, value)))


def test_strangers_come_when_much_is_wrong() -> None:
    """A coordinator that dies disconnects the strangers, and the run ends right."""
    others = tuple(
        Fault(kind="stranger", step=2, value=value) for value in ("silent", "slow_loris", "garbage")
    )
    restart = Fault(kind="restart", step=2, at="TreeNode")
    trace = stars.run(subject(SIMULATED, faults=(*others, restart)))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert [one.let_in for one in trace.of(Admission)] == [False] * 3


def test_every_fault_on_the_way_is_tried_here() -> None:
    """A new kind of fault must be added to one of the tables above."""
    assert {*BREAKS, "freeze", "delay"} == set(faults.ON_THE_WAY)


def test_who_leaves_and_joins() -> None:
    """The trace has the same changes as the reference's, and others compute the shards."""
    leave = Fault(kind="leave", step=1, rank=2)
    join = Fault(kind="join", step=3, rank=2)
    trace = stars.require_right(subject(SIMULATED, faults=(leave, join)))
    assert stars.changes(trace) == [(1, 2, "left"), (3, 2, "joined")]
    made = {(update.step, update.rank) for update in trace.of(Update)}
    assert {step for step, rank in made if rank == 2} == {0, 3, 4}


def test_a_run_that_is_stopped_and_resumed() -> None:
    """Stopping twice changes no weights."""
    stars.require_right(subject(SIMULATED, stops=(1, 3)))


@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_a_value_that_is_not_finite_halts(kind: str) -> None:
    """Worker, step, shard and samples are named, and no worker makes that step."""
    fault = Fault(kind=kind, step=1, rank=1, value="nan")
    trace = stars.run(subject(SIMULATED, faults=(fault,)))
    (halt,) = trace.of(Halt)
    assert (trace.end.status, trace.end.reason) == ("halted", halt.reason)
    assert (halt.step, halt.rank) == (1, 1)
    assert "on worker 1, step 1, shard" in halt.reason
    assert {update.step for update in trace.of(Update)} == {0}
    (ids,) = {shard.ids for shard in trace.of(Shard) if not shard.finite}
    assert halt.ids == ids
    assert [event.rank for event in trace.of(Injected)] == [1]


def test_the_same_scenario_is_the_same_run() -> None:
    """Two runs have equal events, even under a fault."""
    scenario = stars.struck(SIMULATED, "cut", "TreeNode")
    assert stars.run(scenario).events == stars.run(scenario).events
