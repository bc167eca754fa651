"""The parts that all systems of logical shards share: positions, guards, averages, steps."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Injected, Shard
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.coordinator.replicas import Replicas, Worker
from tests import traces


def _alone(**changes: object) -> tuple[Replicas, Worker]:
    scenario = traces.scenario(world_size=1, **changes)
    replicas = Replicas(scenario, faults=scenario.faults)
    return replicas, replicas.new_worker(0, replicas.initial())


def test_positions_go_through_epochs() -> None:
    """Batches of 5, 5 and 2 are an epoch of 12, and the next epoch has another order."""
    replicas, _ = _alone()
    drawn: list[sharding.Ids] = []
    for _ in range(6):
        drawn.append(replicas.batch())
        replicas.advance(len(drawn[-1]))
    assert [len(ids) for ids in drawn] == [5, 5, 2, 5, 5, 2]
    first, second = ([one for ids in part for one in ids] for part in (drawn[:3], drawn[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert replicas.progress(6) == {"step": 6, "schedule_step": 6, "epoch": 2, "offset": 0}


def test_a_shard_is_computed_and_recorded() -> None:
    """The leaf is finite, and its event names its samples."""
    replicas, worker = _alone()
    leaf = replicas.compute(worker, 0, 3, [1, 2])
    (event,) = replicas.recorder.drain()
    assert isinstance(event, Shard)
    assert (event.rank, event.shard, event.ids, event.finite) == (0, 3, (1, 2), True)
    assert (event.loss_sum, event.weight) == (leaf.loss, leaf.weight)
    assert (leaf.level, leaf.index, leaf.vector.nbytes) == (0, 3, replicas.vector_bytes)
    assert replicas.guard(leaf, worker, 0, 3, [1, 2]) is None


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        ("non_finite_gradient", "nan", True),
        ("non_finite_gradient", "-inf", True),
        ("non_finite_loss", "inf", False),
    ],
)
def test_what_is_not_finite_is_named(kind: str, value: str, named: bool) -> None:
    """A halt names tensor and element, or the loss, and the fault is recorded."""
    fault = Fault(kind=kind, step=0, rank=0, shard=3, value=value)
    replicas, worker = _alone(faults=(fault,))
    leaf = replicas.compute(worker, 0, 3, [1, 2])
    injected, event = replicas.recorder.drain()
    assert isinstance(injected, Injected)
    assert (injected.fault, injected.rank, injected.shard) == (fault.to_dict(), 0, 3)
    assert isinstance(event, Shard)
    assert not event.finite
    halt = replicas.guard(leaf, worker, 0, 3, [1, 2])
    assert halt is not None
    assert (halt.rank, halt.shard, halt.ids) == (0, 3, (1, 2))
    first = next(iter(replicas.layout.trainable))
    assert halt.tensor == (first if named else None)
    what = f"non-finite gradient {first}[0]" if named else "non-finite loss inf"
    assert halt.reason.startswith(f"{what} on worker 0, step 0, shard 3: training halted")


@pytest.mark.parametrize(
    ("step", "rank", "shard"), [(1, None, None), (0, 1, None), (0, None, 2), (0, 0, 2)]
)
def test_what_is_meant_for_others_strikes_nobody(
    step: int, rank: int | None, shard: int | None
) -> None:
    """A fault of another step, rank or shard does not strike."""
    fault = Fault(kind="non_finite_loss", step=step, rank=rank, shard=shard, value="nan")
    replicas = Replicas(traces.scenario(world_size=2), faults=(fault,))
    worker = replicas.new_worker(0, replicas.initial())
    assert np.isfinite(replicas.compute(worker, 0, 3, [1, 2]).loss)


def test_the_average_is_clipped_once() -> None:
    """Record and norm are from before clipping, and the applied norm is within the limit."""
    replicas, worker = _alone(clip_norm=1e-3)
    leaf = replicas.compute(worker, 0, 0, [0, 1, 2])
    average = replicas.averaged(leaf.vector, leaf.loss, leaf.weight)
    assert average.clipped.norm > 1e-3 >= average.clipped.applied_norm
    assert average.loss == leaf.loss / leaf.weight
    assert np.array_equal(average.mean, leaf.vector)
    loose, _ = _alone(clip_norm=1e9)
    kept = loose.averaged(leaf.vector, leaf.loss, leaf.weight)
    assert kept.clipped.norm == kept.clipped.applied_norm
    assert kept.record == average.record


def test_everyone_steps_alike() -> None:
    """After a step all workers have the same gradient, weights and moments."""
    replicas = Replicas(traces.scenario(world_size=2, optimizer="adamw"))
    replicas.workers = {rank: replicas.new_worker(rank, replicas.initial()) for rank in (0, 1)}
    leaf = replicas.compute(replicas.workers[0], 0, 0, [0, 1, 2])
    replicas.recorder.drain()
    replicas.apply(0, reduction.Node(0, 0, leaf.vector, leaf.loss, leaf.weight))
    first, second = (replicas.state(worker) for worker in replicas.workers.values())
    assert first == second
    assert first != replicas.state(replicas.new_worker(2, replicas.initial()))
    assert len(replicas.recorder.drain()) == 2
