"""The textbook trainer: its bits, its faults, and its number of workers."""

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
    Attempt,
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


def _leave(rank: int, step: int) -> Fault:
    return Fault(kind="leave", rank=rank, step=step)


def _join(rank: int, step: int) -> Fault:
    return Fault(kind="join", rank=rank, step=step)


def _huge(value: str, **place: Any) -> Fault:
    return Fault(kind="huge_gradient", step=1, value=value, **place)


def _ranks(trace: Trace, step: int) -> list[int]:
    return [update.rank for update in trace.of(Update) if update.step == step]


def _flat_weights(trace: Trace, step: int) -> np.ndarray[Any, Any]:
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
    struck, calm = _flat_weights(_run(fault, **changes), 1), _flat_weights(_run(**changes), 1)
    place = len(calm) - 10 + 3
    assert struck[place] == pytest.approx(value, rel=1e-5)
    np.testing.assert_array_equal(np.delete(struck, place), np.delete(calm, place))


def test_a_huge_gradient_of_one_shard_counts_its_samples() -> None:
    """The micro-batch's share of the value is added to the other micro-batches' gradient."""
    changes: dict[str, Any] = {"accumulation": 2, "num_steps": 2, "clip_norm": 1.0}
    trace, calm = _run(_huge("1e9", rank=1), **changes), _run(**changes)
    assert [(i.rank, i.shard) for i in trace.of(Injected)] == [(1, 2), (1, 3)]
    assert _flat_weights(trace, 1)[0] == pytest.approx(1e9 * 3 / 8)
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


WORLD_SIZES = (1, 2, 3, 4, 5, 8)
Bits = list[tuple[Any, ...]]


@st.composite
def scenarios(draw: st.DrawFn, workload: str) -> Scenario:
    """Draw small runs of one worker, with all that could depend on the number of workers."""
    optimizer, clip_norm = draw(
        st.sampled_from([("sgd", 0.05), ("sgd", None), ("momentum", 0.5), ("adamw", None)])
    )
    return Scenario(
        system="reference",
        workload=workload,
        world_size=1,
        seed=draw(st.integers(0, 2**32)),
        num_shards=draw(st.integers(8, 13)),
        num_samples=21,
        batch_size=draw(st.integers(5, 21)),
        num_steps=3,
        accumulation=draw(st.integers(1, 3)),
        optimizer=optimizer,
        clip_norm=clip_norm,
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        schedule=draw(st.sampled_from(["constant", "cosine"])),
        width=8,
    )


def _run_with(scenario: Scenario) -> Trace:
    trace = systems.run(scenario)
    assert trace.end.status == "completed", trace.end.reason
    return trace


def _updates(trace: Trace) -> Bits:
    """Return the digests, norms and loss of each step on the first worker."""
    bits: Bits = []
    for update in trace.of(Update):
        if len(bits) > update.step:
            continue
        numbers = (update.loss, update.grad_norm, update.applied_norm, update.weight)
        bits.append(
            (
                update.step,
                update.weights,
                update.optimizer,
                update.buffers,
                update.gradient,
                *(None if number is None else float(number).hex() for number in numbers),
            )
        )
    return bits


def _shards(trace: Trace) -> Bits:
    """Return the result of each logical shard, whichever worker computed it."""
    return sorted(
        (s.step, s.shard, s.ids, (s.loss_sum or 0.0).hex(), s.weight, s.draws, repr(s.gradient))
        for s in trace.of(Shard)
    )


def _agree(trace: Trace) -> bool:
    """Return whether all workers hold the same state after every step."""
    held: dict[int, set[str]] = {}
    for update in trace.of(Update):
        text = repr((update.weights, update.optimizer, update.buffers))
        held.setdefault(update.step, set()).add(text)
    return all(len(texts) == 1 for texts in held.values())


def _check_worker_counts(scenario: Scenario) -> None:
    alone = _run_with(scenario)
    for world_size in WORLD_SIZES[1:]:
        trace = _run_with(scenario.with_(world_size=world_size))
        assert _updates(trace) == _updates(alone), f"world_size={world_size}"
        assert _shards(trace) == _shards(alone), f"world_size={world_size}"
        assert _agree(trace), f"world_size={world_size}"


@settings(max_examples=15, deadline=None)
@given(scenarios("linear"))
def test_linear_runs_are_the_same_bits(scenario: Scenario) -> None:
    """All records are equal with 1, 2, 3, 4, 5 and 8 workers."""
    _check_worker_counts(scenario)


@settings(max_examples=12, deadline=None)
@given(scenarios("mlp"))
def test_mlp_runs_are_the_same_bits(scenario: Scenario) -> None:
    """All records are equal with dropout and a buffer, too."""
    _check_worker_counts(scenario)


@settings(max_examples=3, deadline=None)
@given(scenarios("decoder"))
def test_decoder_runs_are_the_same_bits(scenario: Scenario) -> None:
    """All records are equal with samples of unequal weight and frozen tensors, too."""
    _check_worker_counts(scenario)


@settings(max_examples=25, deadline=None)
@given(scenarios("mlp") | scenarios("linear"), st.data())
def test_departures_and_returns_change_no_bit(scenario: Scenario, data: st.DataObject) -> None:
    """Workers may die within any step, and come back later."""
    world_size = data.draw(st.integers(2, 6))
    faults = []
    for rank in sorted(data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))):
        left = data.draw(st.integers(0, 2))
        faults.append(Fault(kind="leave", rank=rank, step=left))
        if left < 2 and data.draw(st.booleans()):
            back = data.draw(st.integers(left + 1, 2))
            faults.append(Fault(kind="join", rank=rank, step=back))
    shrunk = _run_with(scenario.with_(world_size=world_size, faults=tuple(faults)))
    assert _updates(shrunk) == _updates(_run_with(scenario))
    assert _shards(shrunk) == _shards(_run_with(scenario))
    assert _agree(shrunk)


@pytest.mark.parametrize("backends", [("cpu",), ("cpu", "cpu"), ("cpu",) * 5])
def test_how_backends_are_dealt_changes_no_bit(backends: tuple[str, ...]) -> None:
    """Workers on one backend give equal bits, whatever the list of backends."""
    scenario = Scenario(
        system="reference", workload="mlp", world_size=1, seed=3, num_steps=2, width=8
    )
    dealt = _run_with(scenario.with_(world_size=3, backends=backends))
    assert _updates(dealt) == _updates(_run_with(scenario))


def test_the_number_of_shards_does_change_bits() -> None:
    """Another number of shards changes bits: the tests above could fail."""
    scenario = Scenario(
        system="reference", workload="mlp", world_size=1, seed=3, num_steps=2, width=8
    )
    assert _updates(_run_with(scenario)) != _updates(_run_with(scenario.with_(num_shards=9)))


@pytest.mark.wgpu
def test_wgpu_workers_are_the_same_bits() -> None:
    """1 and 3 workers on an adapter, also a software one, give equal bits."""
    scenario = Scenario(
        system="reference",
        workload="linear",
        world_size=1,
        seed=3,
        num_steps=2,
        backends=("wgpu",),
    )
    alone = systems.run(scenario)
    if alone.end.status == "failed":
        pytest.skip(alone.end.reason)
    assert not alone.of(Attempt)
    assert _updates(_run_with(scenario.with_(world_size=3))) == _updates(alone)
