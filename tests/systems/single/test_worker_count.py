"""The reference trainer's main promise: equal bits for any number of workers, even if some die."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Shard, Trace, Update

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


def _run(scenario: Scenario) -> Trace:
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
    alone = _run(scenario)
    for world_size in WORLD_SIZES[1:]:
        trace = _run(scenario.with_(world_size=world_size))
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
    shrunk = _run(scenario.with_(world_size=world_size, faults=tuple(faults)))
    assert _updates(shrunk) == _updates(_run(scenario))
    assert _shards(shrunk) == _shards(_run(scenario))
    assert _agree(shrunk)


@pytest.mark.parametrize("backends", [("cpu",), ("cpu", "cpu"), ("cpu",) * 5])
def test_how_backends_are_dealt_changes_no_bit(backends: tuple[str, ...]) -> None:
    """Workers on one backend give equal bits, whatever the list of backends."""
    scenario = Scenario(
        system="reference", workload="mlp", world_size=1, seed=3, num_steps=2, width=8
    )
    dealt = _run(scenario.with_(world_size=3, backends=backends))
    assert _updates(dealt) == _updates(_run(scenario))


def test_the_number_of_shards_does_change_bits() -> None:
    """Another number of shards changes bits: the tests above could fail."""
    scenario = Scenario(
        system="reference", workload="mlp", world_size=1, seed=3, num_steps=2, width=8
    )
    assert _updates(_run(scenario)) != _updates(_run(scenario.with_(num_shards=9)))


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
    assert _updates(_run(scenario.with_(world_size=3))) == _updates(alone)
