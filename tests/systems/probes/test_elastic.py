"""The system `elastic` strikes where it is told to, and records what each process did."""

from __future__ import annotations

import pytest

from entrenar_py import systems
from entrenar_py.check.clauses import elastic
from entrenar_py.shared.faults import ELASTIC_PLACES, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Grouped, Halt, Injected, Shard, Trace, Update


def run(scenario: Scenario) -> Trace:
    """Return the trace of a run that ended."""
    found = systems.run(scenario)
    assert found.end.status == "completed", found.end.reason
    return found


@pytest.mark.parametrize("at", ELASTIC_PLACES)
def test_a_rank_dies_at_the_moment(at: str) -> None:
    """What it did until then is in its record; the other one trains alone."""
    kill = Fault(kind="kill", rank=1, step=1, at=at)
    found = run(elastic.plan_scenario(kill, world_size=2, num_shards=4, num_steps=3))
    assert [one.fault for one in found.of(Injected)] == [kill.to_dict()]
    own = [one.shard for one in found.of(Shard) if (one.rank, one.step) == (1, 1)]
    assert own == ([2] if at == "Forward" else [2, 3])
    commits = [one.step for one in found.of(Update) if one.rank == 1]
    assert commits == ([0, 1] if at == "Committed" else [0])
    assert [one.members for one in found.of(Grouped) if one.rank == 0] == [(0, 1), (0,)]
    assert {one.step for one in found.of(Update) if one.rank == 0} == {0, 1, 2}


def test_a_process_joins_and_dies_again() -> None:
    """The second fault strikes the second process. A frozen rank that is back soon stays."""
    faults = (
        Fault(kind="kill", rank=1, step=0, at="Backward"),
        Fault(kind="join", rank=1, step=2),
        Fault(kind="kill", rank=1, step=5, at="Exchange"),
        Fault(kind="freeze", rank=0, step=6, at="Stepping", seconds=0.1),
    )
    found = run(elastic.plan_scenario(*faults, world_size=2, num_shards=2))
    stays = elastic.stays_of(found)
    processes = {(one.grouped.rank, one.grouped.process): one for one in stays}
    assert list(processes) == [(0, 1), (1, 1), (1, 2)]
    assert [one.fault["kind"] for one in processes[1, 2].injected] == ["kill"]
    assert processes[1, 2].grouped.received
    assert 7 in processes[0, 1].commits


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="corrupt_gradient", rank=1, step=2, shard=4, value="0.5"),
        Fault(kind="corrupt_worker", rank=1, step=2, value="1e-9", tensor="second.bias", element=1),
    ],
)
def test_a_rank_computes_wrong_bits(fault: Fault) -> None:
    """It halts in that step, also if it is wrong only once, and the others go on without it."""
    found = run(elastic.plan_scenario(fault))
    struck = found.of(Injected)
    assert (struck[0].fault, struck[0].step) == (fault.to_dict(), 2)
    assert len(struck) == 1 or fault.kind == "corrupt_worker"
    (halt,) = found.of(Halt)
    assert (halt.step, halt.rank) == (2, 1)
    assert f"of step 2, first in {struck[0].tensor}" in halt.reason
    commits = {rank: [one.step for one in found.of(Update) if one.rank == rank] for rank in (0, 1)}
    assert commits == {0: [*range(8)], 1: [0, 1]}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ((Fault(kind="join", rank=1, step=1),), "faults join of rank 1 on system elastic"),
        (
            tuple(Fault(kind="kill", rank=1, step=step, at="Forward") for step in (1, 2)),
            "let kill and join take turns",
        ),
    ],
)
def test_faults_that_could_not_strike_are_refused(faults: tuple[Fault, ...], message: str) -> None:
    assert message in systems.run(elastic.plan_scenario(*faults)).end.reason


def test_a_rank_that_fails_ends_the_run() -> None:
    """The reason has what the rank said."""
    found = systems.run(elastic.plan_scenario(num_shards=3))
    assert found.end.status == "failed"
    assert "micro_batches=3" in found.end.reason
