"""Faults of the textbook trainer: ranks that leave and join, and values planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Halt, Injected, Membership, Shard, Start, Trace, Update
from entrenar_py.systems import textbook
from entrenar_py.train.arithmetic import sharding

USUAL = Scenario(
    system="textbook",
    workload="mlp",
    world_size=3,
    seed=0,
    num_shards=5,
    num_samples=21,
    batch_size=8,
    num_steps=6,
    width=8,
    detail="values",
)


def _run(*faults: Fault, **changes: Any) -> Trace:
    trace = systems.run(USUAL.with_(faults=faults, **changes))
    assert trace.end.status != "failed", trace.end.reason
    return trace


def _leave(rank: int, step: int) -> Fault:
    return Fault(kind="leave", rank=rank, step=step)


def _join(rank: int, step: int) -> Fault:
    return Fault(kind="join", rank=rank, step=step)


def _huge(value: str, **place: Any) -> Fault:
    return Fault(kind="huge_gradient", step=1, value=value, **place)


def _ranks(trace: Trace, step: int) -> list[int]:
    return [update.rank for update in trace.of(Update) if update.step == step]


def _flat(trace: Trace, step: int) -> np.ndarray[Any, Any]:
    """Return the averaged gradient of `step`, which all ranks hold."""
    update = next(update for update in trace.of(Update) if update.step == step)
    parts = [record.values() for record in update.gradient.values()]
    return np.concatenate([part for part in parts if part is not None])


# --- ranks that come and go -------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_rank_that_joins_has_everything(optimizer: str) -> None:
    """A joining rank has the weights, moments, schedule and buffers of the others from then on."""
    trace = _run(
        _leave(0, 1), _join(0, 3), optimizer=optimizer, schedule="linear", warmup_steps=2, dropout=0
    )
    assert [_ranks(trace, step) for step in range(5)] == [
        [0, 1, 2],
        [1, 2],
        [1, 2],
        [0, 1, 2],
        [0, 1, 2],
    ]
    changes = [(m.step, m.rank, m.change) for m in trace.of(Membership)]
    assert changes == [(1, 0, "left"), (3, 0, "joined")]
    assert [(i.step, i.rank) for i in trace.of(Injected)] == [(1, 0), (3, 0)]
    start = trace.of(Start)[-1]
    before = next(update for update in trace.of(Update) if update.step == 2)
    assert (start.step, start.rank, start.resumed) == (3, 0, False)
    assert (start.weights, start.optimizer, start.buffers) == (
        before.weights,
        before.optimizer,
        before.buffers,
    )
    assert start.progress == {"epoch": 1, "offset": 0, "schedule_step": 3}
    for step in range(6):
        held = [
            (u.weights, u.optimizer, u.buffers, u.learning_rate)
            for u in trace.of(Update)
            if u.step == step
        ]
        assert all(one == held[0] for one in held)


def test_a_rank_may_come_first_in_the_middle() -> None:
    """The rank is absent until it joins, and every sample is still used once an epoch."""
    trace = _run(_join(1, 2))
    assert [start.rank for start in trace.of(Start)] == [0, 2, 1]
    assert [_ranks(trace, step) for step in (1, 2)] == [[0, 2], [0, 1, 2]]
    for epoch in (0, 1):
        ids = [i for shard in trace.of(Shard) if shard.epoch == epoch for i in shard.ids]
        assert sorted(ids) == list(range(21))


def test_a_rank_that_comes_back_draws_no_mask_again() -> None:
    """The rank's dropout differs from its earlier dropout and from that of other ranks."""
    trace = _run(_leave(1, 2), _join(1, 3), dropout=0.3)
    draws = [shard.draws for shard in trace.of(Shard)]
    assert len(set(draws)) == len(draws)


def test_a_resume_after_a_join_is_the_straight_run() -> None:
    """The checkpoint also has the dropout stream of the rank that joined."""
    faults = (_leave(1, 1), _join(1, 2))
    changes: dict[str, Any] = {"dropout": 0.2, "optimizer": "momentum", "detail": "digests"}
    straight, resumed = _run(*faults, **changes), _run(*faults, stops=(4,), **changes)
    assert resumed.of(Update) == straight.of(Update)


# --- planted values ---------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 21), st.floats(1, 1e38))
def test_a_huge_gradient_is_the_mean_of_itself(
    world_size: int, accumulation: int, batch_size: int, value: float
) -> None:
    """Planted in every sample, the value is the mean; all other elements are unchanged."""
    changes: dict[str, Any] = {
        "world_size": world_size,
        "accumulation": accumulation,
        "batch_size": batch_size,
        "num_steps": 2,
    }
    fault = _huge(str(value), tensor="output.bias", element=3)
    struck, calm = _flat(_run(fault, **changes), 1), _flat(_run(**changes), 1)
    place = len(calm) - 10 + 3
    assert struck[place] == pytest.approx(value, rel=1e-5)
    np.testing.assert_array_equal(np.delete(struck, place), np.delete(calm, place))


def test_a_huge_gradient_of_one_shard_counts_its_samples() -> None:
    """The micro-batch's share of the value is added to the other micro-batches' gradient."""
    changes: dict[str, Any] = {"accumulation": 2, "num_steps": 2, "clip_norm": 1.0}
    trace, calm = _run(_huge("1e9", rank=1), **changes), _run(**changes)
    assert [(i.rank, i.shard) for i in trace.of(Injected)] == [(1, 2), (1, 3)]
    assert _flat(trace, 1)[0] == pytest.approx(1e9 * 3 / 8)
    (one,) = _run(_huge("1e9", shard=0), **changes).of(Injected)
    assert (one.rank, one.shard) == (0, 0)
    assert textbook.huge_element(2.0, 8.0, 0.25) == 4.0
    assert len(calm.of(Update)) == len(trace.of(Update))


def test_clipping_survives_squares_that_overflow() -> None:
    """If squares overflow, the applied norm is the clipping norm, not zero."""
    trace = _run(_huge("1e36"), num_steps=2, clip_norm=1.0)
    last = trace.of(Update)[-1]
    assert last.grad_norm == pytest.approx(1e36, rel=1e-5)
    assert last.applied_norm == pytest.approx(1.0, rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 21), st.integers(0, 5), st.data())
def test_a_logical_shard_is_struck_where_its_first_sample_is(
    world_size: int, accumulation: int, batch_size: int, step: int, data: st.DataObject
) -> None:
    """The fault strikes the micro-batch of the first sample; an empty shard is at the end."""
    num_shards = data.draw(st.integers(world_size, 9))
    shard = data.draw(st.integers(0, num_shards - 1))
    trace = _run(
        Fault(kind="non_finite_loss", step=step, shard=shard, value="nan"),
        world_size=world_size,
        accumulation=accumulation,
        batch_size=batch_size,
        num_shards=num_shards,
    )
    micro_batches = [one for one in trace.of(Shard) if one.step == step]
    batch = [sample for one in micro_batches for sample in one.ids]
    ids = sharding.cut(batch, num_shards)[shard]
    (event,) = trace.of(Injected)
    (halt,) = trace.of(Halt)
    (struck,) = [one for one in micro_batches if one.shard == event.shard]
    assert (ids[0] if ids else batch[-1]) in struck.ids
    assert (halt.step, halt.rank, halt.shard) == (step, struck.rank, struck.shard)


def test_without_a_place_every_micro_batch_is_struck() -> None:
    """Without `rank` and `shard`, a fault strikes every micro-batch, as in the reference."""
    trace = _run(Fault(kind="non_finite_gradient", step=0, value="inf"), accumulation=2)
    assert [event.shard for event in trace.of(Injected)] == [0, 1, 2, 3, 4, 5]
