"""The textbook trainer, an independent oracle, equals the reference within rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Halt,
    Injected,
    Membership,
    Saved,
    Shard,
    Start,
    Tensors,
    Trace,
    Update,
)

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
# Two orders of adding at most 21 float32 terms of one sign pattern, through six steps: the relative
# difference per step is below 21 * 2^-24 = 1.3e-6 of the largest term, and steps of these rates
# don't magnify it. Adam divides by a root and doubles it where gradients are near 0.
RELATIVE = 6 * 21 * 2.0**-24


def _run(*faults: Fault, **changes: Any) -> Trace:
    trace = systems.run(USUAL.with_(faults=faults, **changes))
    assert trace.end.status != "failed", trace.end.reason
    return trace


def _flat(tensors: Tensors) -> np.ndarray[Any, Any]:
    """Return all float32 values of `tensors`, in the order of their names."""
    parts = [tensors[name].values() for name in sorted(tensors)]
    return np.concatenate([part for part in parts if part is not None])


def _distance(one: Tensors, other: Tensors) -> float:
    """Return the largest difference, relative to the largest value."""
    a, b = _flat(one), _flat(other)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_one_rank_is_the_reference(workload: str, clip_norm: float | None, optimizer: str) -> None:
    """Two independent trainers agree in all gradients, weights, buffers, losses and norms."""
    changes: dict[str, Any] = {
        "workload": workload,
        "optimizer": optimizer,
        "clip_norm": clip_norm,
        "world_size": 1,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_steps": 1,
        "num_steps": 3 if workload == "decoder" else 6,
    }
    ours, theirs = _run(system="reference", **changes), _run(**changes)
    assert len(ours.of(Update)) == len(theirs.of(Update)) == changes["num_steps"]
    for a, b in zip(ours.of(Update), theirs.of(Update), strict=True):
        assert _distance(a.gradient, b.gradient) < RELATIVE
        assert _distance({**a.weights, **a.buffers}, {**b.weights, **b.buffers}) < RELATIVE
        assert a.loss == pytest.approx(b.loss, rel=RELATIVE)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=RELATIVE)
        assert a.applied_norm == pytest.approx(b.applied_norm, rel=RELATIVE)
        assert a.learning_rate == pytest.approx(b.learning_rate)
        assert a.weight == b.weight


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 21), st.integers(0, 99))
def test_ranks_and_accumulation_are_rounding(
    world_size: int, accumulation: int, batch_size: int, seed: int
) -> None:
    """Any split of the batch over ranks and micro-batches equals one rank within rounding."""
    changes: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "num_steps": 3}
    alone = _run(world_size=1, **changes)
    split = _run(world_size=world_size, accumulation=accumulation, **changes)
    first = [update for update in split.of(Update) if update.rank == 0]
    for a, b in zip(first, alone.of(Update), strict=True):
        assert _distance(a.weights, b.weights) < RELATIVE
        assert a.loss == pytest.approx(b.loss, rel=RELATIVE)


def test_it_promises_no_bits() -> None:
    """No bits are promised; all ranks are equal after every step, and use every sample once."""
    trace = _run(optimizer="adamw", dropout=0.2)
    assert trace.promises == ()
    for step in range(6):
        held = [(u.weights, u.optimizer, u.buffers) for u in trace.of(Update) if u.step == step]
        assert len(held) == 3
        assert held[0] == held[1] == held[2]
    for epoch in (0, 1):
        ids = [i for shard in trace.of(Shard) if shard.epoch == epoch for i in shard.ids]
        assert sorted(ids) == list(range(21))


@settings(max_examples=10, deadline=None)
@given(
    st.sets(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from(["sgd", "momentum", "adamw"]),
)
def test_a_resumed_run_is_the_straight_one(stops: set[int], optimizer: str) -> None:
    """Weights, moments, schedule and each rank's dropout stream are restored bit by bit."""
    changes: dict[str, Any] = {
        "optimizer": optimizer,
        "dropout": 0.2,
        "schedule": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "detail": "digests",
    }
    straight, resumed = _run(**changes), _run(stops=tuple(stops), **changes)
    assert resumed.of(Update) == straight.of(Update)
    assert resumed.of(Shard) == straight.of(Shard)
    assert [saved.step for saved in resumed.of(Saved)] == sorted(stops)
    assert sum(start.resumed for start in resumed.of(Start)) == 3 * len(stops)


def test_departures_are_recorded_and_the_rest_go_on() -> None:
    """Other ranks take over the samples of a rank that left; the first of them saves."""
    trace = _run(Fault(kind="leave", rank=0, step=2), stops=(4,))
    assert [(m.step, m.rank, m.change) for m in trace.of(Membership)] == [(2, 0, "left")]
    assert {u.rank for u in trace.of(Update) if u.step >= 2} == {1, 2}
    assert trace.of(Saved)[0].rank == 1
    ids = [i for shard in trace.of(Shard) if shard.epoch == 0 for i in shard.ids]
    assert sorted(ids) == list(range(21))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_a_halt_names_the_rank(kind: str, value: str) -> None:
    """A halt names step, rank, micro-batch and samples, and the step is not made."""
    trace = _run(Fault(kind=kind, step=2, rank=1, value=value), accumulation=2)
    (halt,) = trace.of(Halt)
    culprit = next(shard for shard in trace.of(Shard) if not shard.finite)
    assert (trace.end.status, halt.step, halt.rank, halt.shard) == ("halted", 2, 1, 2)
    assert halt.ids == culprit.ids
    assert max(update.step for update in trace.of(Update)) == 1
    assert [(i.step, i.rank, i.shard) for i in trace.of(Injected)] == [(2, 1, 2), (2, 1, 3)]


def test_a_fault_on_a_rank_without_samples_strikes_too() -> None:
    """With two samples on three ranks, a NaN on the third rank still halts the run."""
    fault = Fault(kind="non_finite_gradient", step=0, rank=2, value="nan")
    trace = _run(fault, batch_size=2)
    assert trace.end.status == "halted"
    assert trace.of(Halt)[0].rank == 2
