"""A resumed run may add the gradients of its workers in another order than the straight run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from entrenar_py.check.causes import summation
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event, Shard, Tensors, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Tally

WORKERS = 4


def run(gradients: Sequence[float], *, terms: float = 1.0, workers: int = WORKERS) -> Trace:
    """Return a run whose ranks each have the gradient `terms`, and apply those of `gradients`."""
    scenario = Scenario(
        system="command",
        workload="own",
        world_size=workers,
        seed=0,
        num_shards=4,
        num_samples=4,
        batch_size=4,
        num_steps=len(gradients),
    )
    events: list[Event] = []
    for step, value in enumerate(gradients):
        events += [_shard(step, rank, terms) for rank in range(workers)]
        events += [_update(step, rank, value) for rank in range(workers)]
    events.append(End(status="completed"))
    return Trace(scenario=scenario, environment={}, promises=(), events=tuple(events))


def _tensors(value: float) -> Tensors:
    return {"w": record_tensor(np.array([value], np.float32), values=True)}


def _shard(step: int, rank: int, term: float) -> Shard:
    return Shard(
        step=step,
        epoch=0,
        rank=rank,
        shard=rank,
        ids=(rank,),
        loss_sum=None,
        weight=1.0,
        finite=True,
        gradient=_tensors(term),
    )


def _update(step: int, rank: int, value: float) -> Update:
    return Update(
        step=step,
        rank=rank,
        loss=None,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights=_tensors(value),
        gradient=_tensors(value),
    )


def test_steps_from_the_first_rounding_on_are_left_out() -> None:
    """What comes before is still compared, and the reason says why the rest is not."""
    tally = Tally("F-TI-003")
    straight, resumed = run([1.0, 1.0, 2.0]), run([1.0, float(np.float32(1.0) + 2**-23), 5.0])
    kept = summation.comparable(tally, straight, resumed)
    assert [sorted({update.step for update in one.of(Update)}) for one in kept] == [[0], [0]]
    assert "another rounding of their sum" in tally.finding(nothing="").reason


@pytest.mark.parametrize(
    ("resumed", "why"),
    [
        (run([1.0, 1.0]), "the same bits"),
        (run([1.0, 1.01]), "more than rounding"),
        (run([1.0, float(np.float32(1.0) + 2**-23)], terms=2.0), "other gradients of the ranks"),
    ],
)
def test_any_other_difference_is_compared(resumed: Trace, why: str) -> None:
    """Nothing is left out of runs that are equal, or that differ by something else."""
    straight = run([1.0, 1.0])
    tally = Tally("F-TI-003")
    assert summation.comparable(tally, straight, resumed) == (straight, resumed), why


def test_two_ranks_add_alike_in_any_order() -> None:
    """A sum of two has one rounding."""
    straight, resumed = run([1.0], workers=2), run([float(np.float32(1.0) + 2**-23)], workers=2)
    assert summation.comparable(Tally("F-TI-003"), straight, resumed) == (straight, resumed)
