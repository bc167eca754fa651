"""A tensor that is no sum of its micro-batches, where the others are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import changed_sums, run_comparison
from entrenar_py.check.causes.sensitivity import Sensitivity
from entrenar_py.shared.trace import Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import Vectors, records, trace_of

BOUND = 1e-4
SIZE, NAMES = 40, ("a", "b", "c")
DRAWN = np.random.default_rng(8)
# What the four micro-batches of a step give, and what rounding makes of another run.
LOCAL = [{name: DRAWN.normal(size=SIZE) for name in NAMES} for _ in range(4)]
NOISE = {name: 1e-3 * DRAWN.normal(size=SIZE) for name in NAMES}
OFF = np.where(np.arange(SIZE) == 7, 0.02, 0.0)


def plus(*terms: Vectors, shares: tuple[float, ...] = (1.0,) * 4) -> dict[str, Any]:
    """Return a sum of gradients, each with its share."""
    parts = [*zip(terms, shares, strict=False)]
    return {name: np.sum([share * one[name] for one, share in parts], axis=0) for name in NAMES}


RIGHT = plus(*LOCAL)
NEAR = plus(RIGHT, NOISE)


def with_row(applied: Mapping[str, Any]) -> dict[str, Any]:
    """Return a gradient with one wrong element of b."""
    return {**applied, "b": applied["b"] + OFF}


def run(applied: Vectors, *, weights: Vectors | None = None, **traits: Any) -> Trace:
    """Return a run of one step of two ranks, each with two micro-batches."""
    held = records(weights or {name: np.ones(SIZE) for name in NAMES})
    base = trace_of([{}])

    def changed(event: Any) -> Any:
        if isinstance(event, Shard):
            return replace(event, gradient=records(LOCAL[event.shard]))
        if isinstance(event, Update):
            return replace(event, gradient=records(applied), weights=held)
        return replace(event, weights=held) if isinstance(event, Start) else event

    events = tuple(map(changed, base.events))
    return replace(base, events=events, traits=replace(base.traits, **traits))


def changes(
    applied: Vectors, other: Vectors, *, bound: float = BOUND, **given: Any
) -> dict[str, changed_sums.Change]:
    """Return what is changed in a run that applies `applied`, beside one that applies `other`."""
    trace = run(applied, **given)
    update, model = (traces.one(one, Update, rank=0) for one in (trace, run(other)))
    return changed_sums.of(trace, update, model, bound)


def compared(applied: Vectors, **given: Any) -> Tally:
    """Return the comparison with a run on one worker, where rounding makes a tenth."""
    shown = Sensitivity({"gradient": {0: 2e-2}, "weights": {0: 1.0}})
    tally = Tally("F-DP-005", observed=True)
    run_comparison.compare(tally, run(NEAR), run(applied, **given), None, sensitivity=shown)
    return tally


@pytest.mark.parametrize("other", [RIGHT, NEAR])
def test_a_changed_row(other: Vectors) -> None:
    """It is found though rounding makes the runs differ, and what is right is known."""
    found = changes(with_row(RIGHT), other)
    assert [*found] == ["b"]
    np.testing.assert_allclose(found["b"].change, OFF, atol=1e-5)
    np.testing.assert_allclose(found["b"].right, RIGHT["b"], atol=1e-5)
    assert found["b"].relative == pytest.approx(0.02 / np.linalg.norm(RIGHT["b"]), rel=0.01)


@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0, 1.0), (0.5, 2.0, 1.0, 3.0)])
def test_micro_batches_count_by_any_shares(shares: tuple[float, ...]) -> None:
    """A script may weigh them by their samples, after the backward passes."""
    whole = plus(*LOCAL, shares=shares)
    assert changes(whole, plus(whole, NOISE)) == {}
    assert [*changes(with_row(whole), plus(whole, NOISE))] == ["b"]


def test_what_both_runs_change() -> None:
    """A script that changes gradients on purpose does so on one worker, too."""
    assert changes(with_row(RIGHT), with_row(NEAR)) == {}


def test_runs_that_differ_by_something_else() -> None:
    """Where the change is lost in what else differs, nothing is known."""
    assert changes(with_row(RIGHT), plus(RIGHT, NOISE, shares=(1.0, 20.0))) == {}


def test_micro_batches_that_are_not_seen_rightly() -> None:
    """Where two runs agree, their gradients are right whatever the micro-batches are."""
    other = {**RIGHT, "b": LOCAL[0]["b"]}
    assert changes(other, plus(other, NOISE)) == {}


def test_sums_that_are_rounded() -> None:
    """All tensors are changed then; what is no larger than the bound is none."""
    rounded = {name: np.round(64 * vector) / 64 for name, vector in RIGHT.items()}
    assert changes(rounded, RIGHT) == {}
    assert changes(with_row(RIGHT), RIGHT, bound=0.1) == {}


def test_a_tensor_in_16_bits() -> None:
    """In a training in 16 bits a tensor may be added in these, beside others in float32."""
    coarse = {"a": 1 + np.arange(SIZE) / 128}
    wrong = with_row(RIGHT)
    assert [*changes(wrong, RIGHT, weights=coarse)] == ["b"]
    bits = wrong["b"].astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    cut = {**wrong, "b": bits.view(np.float32)}
    assert changes(cut, RIGHT, weights=coarse) == {}
    assert [*changes(cut, RIGHT)] == ["b"]


def test_a_change_below_what_rounding_makes() -> None:
    """It is found all the same, at its tensor and element."""
    broken = compared(with_row(RIGHT)).broken
    assert broken is not None
    assert (broken.step, broken.tensor, broken.element) == (0, "b", 7)
    assert "in what none of its micro-batches gave, allowed 0.0001" in broken.message
    assert compared(RIGHT).broken is None


def test_gradients_that_are_sent_in_16_bits() -> None:
    """How their sums are rounded is declared."""
    assert compared(with_row(RIGHT), compressed="bfloat16").broken is None
