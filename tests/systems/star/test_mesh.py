"""The mesh over TCP, with each worker in its own process, under real faults."""

from __future__ import annotations

import pytest

from entrenar_py.shared import faults, trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Halt, Membership, Update
from tests.systems import stars
from tests.systems.stars import MESH, subject


@pytest.mark.parametrize("workload", ["linear", "decoder"])
def test_any_number_of_processes_gives_the_reference(workload: str) -> None:
    """With 1, 2, 3 and 4 workers every step has the digest of the reference."""
    block_bytes = {"linear": 4, "decoder": 4_000}[workload]
    options = {**stars.SOON, "dead_after_s": 10.0, "block_bytes": block_bytes}
    scenario = subject(MESH, workload=workload, num_steps=3, options=options)
    digests = set()
    for world_size in (1, 2, 3, 4):
        run = stars.run(scenario.with_(world_size=world_size))
        assert {update.rank for update in run.of(Update)} == set(range(world_size))
        digests.add(_digests(stars.held(run)))
    assert digests == {_digests(stars.expected(scenario))}


def _digests(steps: list[trace.Tensors]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the digests of the weights after each step."""
    return tuple(tuple((name, one.digest) for name, one in step.items()) for step in steps)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("kill", "Assign"),
        ("kill", "TreeNode"),
        ("kill", "Average"),
        ("kill", "Commit"),
        ("kill", "Applied"),
        ("cut", "Computed"),
        ("half_open", "Staged"),
        ("flip", "Assign"),
        ("reorder", "Applied"),
    ],
)
def test_who_is_cut_off(kind: str, at: str) -> None:
    """The worker is given up and comes back with the whole state, and no bit changes."""
    run = stars.run(stars.struck(MESH, kind, at))
    assert stars.held(run) == stars.expected(run.scenario)
    stars.require_back(run)


@pytest.mark.parametrize("at", ["TreeNode", "Average"])
@pytest.mark.parametrize("kind", ["cut", "half_open", "truncate", "flip", "duplicate"])
def test_what_breaks_between_two_workers(kind: str, at: str) -> None:
    """No worker leaves: the exchange starts again over another link, and no bit changes."""
    run = stars.run(stars.struck(MESH, kind, at))
    assert stars.held(run) == stars.expected(run.scenario)
    assert stars.changes(run) == []


@pytest.mark.parametrize("at", ["Assign", "Average"])
def test_a_short_while_is_waited_for(at: str) -> None:
    """A worker that comes back in time is not given up."""
    run = stars.run(stars.struck(MESH, "freeze", at, seconds=0.2))
    assert stars.held(run) == stars.expected(run.scenario)
    assert stars.changes(run) == []


def test_a_long_while_is_not() -> None:
    """The others go on, and the frozen worker comes back with the whole state."""
    run = stars.run(stars.struck(MESH, "freeze", "TreeNode", seconds=4.0))
    assert stars.held(run) == stars.expected(run.scenario)
    assert (stars.STEP, 1, "left") in stars.changes(run)


@pytest.mark.parametrize(
    ("value", "at"), [("old_step", "TreeNode"), ("twice", "TreeNode"), ("not_mine", "Computed")]
)
def test_a_lie_changes_no_bit(value: str, at: str) -> None:
    """A lie to the coordinator or to another worker changes no bit."""
    run = stars.run(stars.lying(MESH, value, at))
    assert stars.held(run) == stars.expected(run.scenario)


@pytest.mark.parametrize("value", faults.STRANGERS)
def test_strangers_are_turned_away(value: str) -> None:
    """Strangers at real sockets do not affect the run."""
    run = stars.run(stars.visited(MESH, value))
    assert stars.held(run) == stars.expected(run.scenario)
    stars.require_turned_away(run)


def test_who_leaves_and_joins() -> None:
    """One worker is killed for good, and one joins later."""
    leave, join = (
        Fault(kind=kind, step=step, rank=2) for kind, step in (("leave", 1), ("join", 3))
    )
    run = stars.require_right(subject(MESH, faults=(leave, join)))
    assert stars.changes(run) == [(1, 2, "left"), (3, 2, "joined")]


@pytest.mark.parametrize("at", ["TreeNode", "Staged", "Commit"])
def test_a_coordinator_that_dies(at: str) -> None:
    """All workers go on from its checkpoint, whichever message it died at."""
    run = stars.require_right(subject(MESH, faults=(Fault(kind="restart", step=1, at=at),)))
    assert {event.reason for event in run.of(Membership)} == {"the coordinator died"}


def test_a_run_that_is_stopped_and_resumed() -> None:
    """A run is stopped twice, and resumed by new processes each time."""
    stars.require_right(subject(MESH, stops=(1, 3)))


def test_a_value_that_is_not_finite_halts_everyone() -> None:
    """All processes halt with the one reason that names the worker, and none steps."""
    fault = Fault(kind="non_finite_gradient", step=1, rank=1, value="inf")
    run = stars.run(subject(MESH, faults=(fault,)))
    (halt,) = run.of(Halt)
    assert (run.end.status, run.end.reason) == ("halted", halt.reason)
    assert "on worker 1, step 1, shard" in halt.reason
    assert {update.step for update in run.of(Update)} == {0}
