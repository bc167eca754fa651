"""The mesh in virtual time has the reference's bits under every fault."""

from __future__ import annotations

import pytest

from entrenar_py.shared import faults
from entrenar_py.shared.faults import PLACES, Fault
from entrenar_py.shared.trace import Halt, Injected, Membership, Shard, Update
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message, State
from tests.systems import stars
from tests.systems.stars import MESH_SIMULATED, STEP, subject

# Virtual seconds: within the timeouts of both ends, and beyond them.
SHORT_S, LONG_S = 1.0, 40.0
BREAKS = ("kill", "cut", "half_open", "duplicate", "reorder", "truncate", "flip")
# The messages between workers; if one of these links breaks, the coordinator is still connected.
BETWEEN = ("TreeNode", "Average")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_any_number_of_workers_gives_the_reference(workload: str, world_size: int) -> None:
    """The weights after every step are those of the reference."""
    options = {"block_bytes": 4 if workload == "linear" else 4_000}
    stars.require_right(
        subject(MESH_SIMULATED, workload=workload, world_size=world_size, options=options)
    )


@pytest.mark.parametrize(("kind", "at"), stars.spread(BREAKS, PLACES, shift=3))
def test_what_breaks_a_connection(kind: str, at: str) -> None:
    """A worker that is cut off comes back with the whole state, and no bit changes."""
    trace = stars.require_right(stars.struck(MESH_SIMULATED, kind, at))
    if at in BETWEEN and kind != "kill":
        assert stars.changes(trace) == []
    else:
        stars.require_back(trace)


@pytest.mark.parametrize(("kind", "at"), stars.spread(["delay", "freeze"], PLACES))
def test_what_takes_time(kind: str, at: str) -> None:
    """A short delay is waited for; after a long one the worker, or its link, is given up."""
    scenario = stars.struck(MESH_SIMULATED, kind, at, SHORT_S)
    assert stars.changes(stars.require_right(scenario)) == []
    trace = stars.require_right(stars.struck(MESH_SIMULATED, kind, at, LONG_S))
    if at in BETWEEN and kind == "delay":
        assert stars.changes(trace) == []
    else:
        stars.require_back(trace)


def test_a_state_that_can_not_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with an invalid state is dropped before its admission; another is asked."""
    payload, given = Member.payload, list[int]()

    def bent(self: Member, message: Message) -> Buffer:
        data = payload(self, message)
        if isinstance(message, State) and not given:
            given.append(self.rank)
            assert isinstance(data, bytearray)
            data[8:16] = (10**6).to_bytes(8, "little")  # offset into the epoch
        return data

    monkeypatch.setattr(Member, "payload", bent)
    killed = stars.struck(MESH_SIMULATED, "kill", "Computed").faults
    trace = stars.require_right(subject(MESH_SIMULATED, seed=4, faults=killed))
    left = [one for one in trace.of(Membership) if one.change == "left"]
    assert [one.rank for one in left] == [1, *given]
    assert "offset=1000000): no sample has that offset" in left[1].reason


@pytest.mark.parametrize("block_bytes", [40, 100, 604])
@pytest.mark.parametrize("at", BETWEEN)
def test_blocks_of_any_size_give_the_reference(block_bytes: int, at: str) -> None:
    """The bits are equal for any size of blocks, even if a worker dies between two."""
    fault = Fault(kind="kill", step=STEP, rank=BETWEEN.index(at) ^ 1, at=at)  # 0 owns them all
    stars.require_right(stars.in_blocks(MESH_SIMULATED, block_bytes, faults=(fault,)))


@pytest.mark.parametrize(("value", "at"), stars.LIES)
def test_a_lie_changes_no_bit(value: str, at: str) -> None:
    """A lie to the coordinator costs the worker its place; one to another worker costs the link."""
    trace = stars.require_right(stars.lying(MESH_SIMULATED, value, at))
    if at in BETWEEN or (value, at) == (
        "twice",
        "Staged",
    ):  # Staged may be sent again in each round
        assert stars.changes(trace) == []
    else:
        stars.require_back(trace)


@pytest.mark.parametrize("value", faults.STRANGERS)
def test_strangers_are_turned_away(value: str) -> None:
    """Strangers of every kind do not affect the run."""
    stars.require_turned_away(stars.require_right(stars.visited(MESH_SIMULATED, value)))


def test_who_leaves_and_joins() -> None:
    """A dead worker's shards are computed again; a joining worker gets another's state."""
    leave = Fault(kind="leave", step=1, rank=2)
    join = Fault(kind="join", step=3, rank=2)
    trace = stars.require_right(subject(MESH_SIMULATED, faults=(leave, join)))
    assert stars.changes(trace) == [(1, 2, "left"), (3, 2, "joined")]
    made = {(update.step, update.rank) for update in trace.of(Update)}
    assert {step for step, rank in made if rank == 2} == {0, 3, 4}


def test_all_but_one_are_lost() -> None:
    """All but one are lost in one step, at different messages; the last one does all the work."""
    planned = tuple(
        Fault(kind="kill", step=STEP, rank=rank, at=at)
        for rank, at in enumerate(("TreeNode", "Average", "Staged"))
    )
    scenario = subject(MESH_SIMULATED, world_size=4, options={"block_bytes": 4}, faults=planned)
    trace = stars.run(scenario.with_(workload="mlp", width=1, options={"block_bytes": 100}))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert len(trace.of(Injected)) == 3


@pytest.mark.parametrize("at", [at for at in PLACES if at not in BETWEEN])
@pytest.mark.parametrize("kind", ["cut", "half_open"])
def test_all_are_cut_off(kind: str, at: str) -> None:
    """All workers come back with their state, and no bit changes."""
    planned = tuple(Fault(kind=kind, step=STEP, rank=rank, at=at) for rank in range(3))
    trace = stars.run(subject(MESH_SIMULATED, faults=planned))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert len(trace.of(Injected)) == len(planned)
    assert [change for _, _, change in stars.changes(trace)].count("joined") == 3


def test_all_are_lost() -> None:
    """If all workers die the state is lost, and the run fails with that reason."""
    planned = tuple(Fault(kind="kill", step=STEP, rank=rank, at="Assign") for rank in range(3))
    trace = stars.run(subject(MESH_SIMULATED, faults=planned))
    reason = "no worker is left that holds the state before step 2: go on from the last checkpoint"
    assert (trace.end.status, trace.end.reason) == ("failed", reason)


def test_a_coordinator_that_dies() -> None:
    """Another coordinator goes on from its checkpoint with the workers that come back."""
    stars.require_right(
        subject(MESH_SIMULATED, faults=(Fault(kind="restart", step=STEP, at="Average"),))
    )


def test_a_run_that_is_stopped_and_resumed() -> None:
    """Stopping twice changes no weights."""
    stars.require_right(subject(MESH_SIMULATED, stops=(1, 3)))


@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_a_value_that_is_not_finite_halts(kind: str) -> None:
    """Worker, step, shard and samples are named, and no worker makes that step."""
    fault = Fault(kind=kind, step=1, rank=1, value="nan")
    trace = stars.run(subject(MESH_SIMULATED, faults=(fault,)))
    (halt,) = trace.of(Halt)
    assert (trace.end.status, trace.end.reason) == ("halted", halt.reason)
    assert (halt.step, halt.rank) == (1, 1)
    assert {update.step for update in trace.of(Update)} == {0}
    (ids,) = {shard.ids for shard in trace.of(Shard) if not shard.finite}
    assert halt.ids == ids


def test_the_same_scenario_is_the_same_run() -> None:
    """Two runs have equal events, even under a fault."""
    scenario = stars.struck(MESH_SIMULATED, "cut", "TreeNode")
    assert stars.run(scenario).events == stars.run(scenario).events
