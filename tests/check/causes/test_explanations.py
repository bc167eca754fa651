"""Differences of two runs that one equation explains, whatever else may differ between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations, run_comparison
from entrenar_py.check.causes.rounding_bounds import Sensitivity
from entrenar_py.shared.faults import OF_RECORDS, Fault
from entrenar_py.shared.trace import Drawn, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally, Verdict
from tests import traces
from tests.check.causes.test_presuppositions import own, parity
from tests.check.clauses.micro_batch_traces import (
    LOCAL,
    STEPS,
    Vectors,
    plus,
    summed,
    times,
    trace_of,
)
from tests.traces import altered, broken, records, undecided

Change = Callable[[Tensors, Trace], Tensors]


def drawing(trace: Trace) -> Trace:
    """Return the run of a script that draws masks in the forward pass, on each rank its own."""
    draws = tuple(
        Drawn(
            step=0,
            rank=rank,
            part=rank,
            generator="torch",
            before=f"{rank}",
            after=f"{rank}b",
            where="forward",
            micro_batch=0,
        )
        for rank in range(trace.scenario.world_size)
    )
    return replace(trace, events=(*draws, *trace.events))


def applied(trace: Trace, change: Change) -> Trace:
    gradient = change(traces.one(trace, Update, step=0, rank=0).gradient, trace)
    return traces.altered(trace, Update, {"step": 0}, gradient=gradient)


def all_halved(gradient: Tensors, _: Trace) -> Tensors:
    return evidence.times(gradient, 0.5)


def some_tripled(gradient: Tensors, _: Trace) -> Tensors:
    return {**gradient, **evidence.times({"hidden2.weight": gradient["hidden2.weight"]}, 3.0)}


def of_one_rank(gradient: Tensors, trace: Trace) -> Tensors:
    return traces.one(trace, Shard, step=0, rank=1).gradient


def masked(gradient: Tensors, _: Trace) -> Tensors:
    given = np.random.default_rng(1)
    return {
        name: traces.values(*(values * given.uniform(0.5, 1.5, values.shape)))
        for name, record in gradient.items()
        if (values := record.values()) is not None
    }


def masked_and_halved(gradient: Tensors, trace: Trace) -> Tensors:
    return masked(all_halved(gradient, trace), trace)


def centred(gradient: Tensors, _: Trace) -> Tensors:
    return {
        name: traces.values(*(values - values.mean()))
        for name, record in gradient.items()
        if (values := record.values()) is not None
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (all_halved, "all tensors have the factor 1/2"),
        (some_tripled, "hidden2.weight has the factor 3 (world_size)"),
        (of_one_rank, "micro-batches count differently"),
    ],
)
def test_random_draws_are_no_excuse_for_one_equation(change: Change, words: str) -> None:
    """Other masks leave no gradient that is an exact multiple of the right one, or an exact sum."""
    finding = parity(applied(drawing(own(3)), change), own(1))
    assert traces.broken(finding).step == 0
    assert any(words in note for note in finding.notes), finding.notes


@pytest.mark.parametrize("change", [masked, masked_and_halved, centred])
def test_what_no_equation_explains_may_come_from_random_draws(change: Change) -> None:
    """A right script whose masks depend on the rank is not falsified."""
    assert "in the model's forward pass" in undecided(
        parity(applied(drawing(own(3)), change), own(1))
    )


@pytest.mark.parametrize(
    ("change", "verdict"), [(all_halved, Verdict.FALSIFIED), (masked, Verdict.INCONCLUSIVE)]
)
def test_dropout_is_no_excuse_either(change: Change, verdict: Verdict) -> None:
    """Runs whose masks may differ are compared where their gradients follow from each other."""
    runs = [applied(own(3), change), own(1)]
    dropped = [replace(run, scenario=run.scenario.with_(dropout=0.1)) for run in runs]
    finding = parity(*dropped)
    assert finding.verdict is verdict, finding


def test_shares_that_may_be_drawn_are_left_open() -> None:
    """Ranks that weigh their losses by numbers of their own add up to no gradient of one worker."""
    trace = drawing(own(3))
    for shard in [s for s in trace.of(Shard) if s.step == 0]:
        gradient = evidence.times(shard.gradient, 1.0 + 0.3 * shard.shard)
        trace = traces.altered(trace, Shard, {"step": 0, "shard": shard.shard}, gradient=gradient)
    total = {}
    for name in traces.one(trace, Shard, step=0).gradient:
        parts = [s.gradient[name].values() for s in trace.of(Shard) if s.step == 0]
        total[name] = traces.values(*np.sum([part for part in parts if part is not None], axis=0))
    undecided(parity(applied(trace, lambda *_: evidence.times(total, 0.2)), own(1)))


def test_few_elements_are_multiples_by_chance() -> None:
    """A factor of a single tensor, or of a few numbers, explains nothing."""
    trace, alone = own(3), own(1)
    kept = {"hidden1.bias"}
    small = [
        altered(
            run,
            Update | Shard,
            {},
            gradient=lambda e: {n: r for n, r in e.gradient.items() if n in kept},
        )
        for run in (applied(trace, all_halved), alone)
    ]
    assert explanations.difference(small[1], small[0], 0, 1e-4) is None
    whole = explanations.difference(alone, applied(trace, all_halved), 0, 1e-4)
    assert whole is not None


@pytest.mark.parametrize(
    ("factor", "faults", "is_told"),
    [
        (0.516, (Fault(kind=OF_RECORDS[0], step=0, value="2"),), False),
        (0.516, (), True),
        (0.5, (Fault(kind=OF_RECORDS[0], step=0, value="2"),), True),
    ],
)
def test_a_number_of_one_workers_own_samples_explains_nothing(
    factor: float, faults: tuple[Fault, ...], is_told: bool
) -> None:
    """A worker that is given others' batches may divide by a number of those that it drew itself.

    Then one factor is left that nobody chooses.
    """
    alone, many = own(1), own(2)
    alone = replace(alone, scenario=alone.scenario.with_(faults=faults))
    many = applied(many, lambda gradient, _: evidence.times(gradient, factor))
    assert bool(explanations.difference(alone, many, 0, 1e-4)) is is_told


# --- shares ---------------------------------------------------------------------------------------
# How much each micro-batch would have to count for a gradient to be right.


TRACE = trace_of([summed(step) for step in range(STEPS)])
(UPDATE,) = [one for one in TRACE.of(Update) if (one.step, one.rank) == (0, 0)]


def weighted(*factors: float) -> Vectors:
    """Return the sum of the first step's micro-batches, each with a factor."""
    given = [one for of_rank in LOCAL[0] for one in of_rank]
    return plus(*(times(factor, one) for factor, one in zip(factors, given, strict=True)))


def test_shares_are_named() -> None:
    """Each micro-batch is named with its share, relative to the one that it has."""
    told = explanations.explain_shares(
        TRACE, UPDATE, records(weighted(0.25, 0.25, 0.75, 0.75)), 1e-4
    )
    assert (
        "the samples of rank 0 in micro-batch 0 0.5 times, rank 0 in micro-batch 1 0.5 times"
        in told
    )
    assert "rank 1 in micro-batch 0 1.5 times" in told
    assert "a mean of means" not in told, "all have the same weight"


def test_weights_explain_them() -> None:
    """If the right shares are the weights', the means were added without them."""
    trace = TRACE
    for shard, weight in enumerate((2.0, 4.0, 6.0, 8.0)):
        for_shard = {"step": 0, "shard": shard}
        trace = traces.altered(trace, type(trace.events[2]), for_shard, weight=weight)
    told = explanations.explain_shares(trace, UPDATE, records(weighted(0.1, 0.2, 0.3, 0.4)), 1e-4)
    assert told.endswith("as their samples or tokens say, which could mean: a mean of means")


@pytest.mark.parametrize("due", [summed(0), times(3.0, summed(0)), summed(1)])
def test_what_shares_do_not_explain(due: Vectors) -> None:
    """Equal shares, one factor, and a gradient of other samples say nothing."""
    assert explanations.explain_shares(TRACE, UPDATE, records(due), 1e-4) == ""


@pytest.mark.parametrize(
    ("nudge", "is_told"), [(0.0, True), (1e-4, True), (1e-2, False)], ids=["same", "near", "far"]
)
def test_a_later_step_of_other_weights(nudge: float, is_told: bool) -> None:
    """Wrong shares are told from what other weights make of a gradient."""
    due = plus(weighted(0.25, 0.25, 0.75, 0.75), times(nudge, summed(1)))
    assert bool(explained_later(due)) is is_told
    assert not explained_later(plus(summed(0), times(nudge, due)))


def test_a_later_step_that_is_off_by_no_more_than_rounding() -> None:
    """Wrong shares are not told if the gradient is as near as right runs may be."""
    due = weighted(0.25, 0.25, 0.75, 0.75)
    assert explained_later(due, bound=0.1)
    assert not explained_later(due, bound=1.0)
    assert not explained_later(due, floor=10.0)


def explained_later(due: Vectors, bound: float = 1e-4, floor: float = 0.0) -> str:
    """Return what is said of TRACE's first step, made once more, if its gradient is to be `due`."""
    first = [event for event in TRACE.events if getattr(event, "step", None) == 0]
    again = [replace(one, step=1) for one in first if isinstance(one, Shard | Update)]
    trace = replace(TRACE, events=(*first, *again))
    model = evidence.replaced(
        trace, Update, lambda update: {"gradient": records(due)} if update.step else {}
    )
    later = explanations.LaterSteps(model, trace)
    return later.explain(replace(UPDATE, step=1), bound, floor)


# --- changed sums ---------------------------------------------------------------------------------
# A tensor that is no sum of its micro-batches, where the others are.


BOUND = 1e-4
SIZE, NAMES = 40, ("a", "b", "c")
DRAWN = np.random.default_rng(8)
# What the four micro-batches of a step give, and what rounding makes of another run.
BATCHES = [{name: DRAWN.normal(size=SIZE) for name in NAMES} for _ in range(4)]
NOISE = {name: 1e-3 * DRAWN.normal(size=SIZE) for name in NAMES}
OFF = np.where(np.arange(SIZE) == 7, 0.02, 0.0)


def sum_of_shares(*terms: Vectors, shares: tuple[float, ...] = (1.0,) * 4) -> dict[str, Any]:
    parts = [*zip(terms, shares, strict=False)]
    return {name: np.sum([share * one[name] for one, share in parts], axis=0) for name in NAMES}


RIGHT = sum_of_shares(*BATCHES)
NEAR = sum_of_shares(RIGHT, NOISE)


def with_row(applied: Mapping[str, Any]) -> dict[str, Any]:
    """Return a gradient with one wrong element of b."""
    return {**applied, "b": applied["b"] + OFF}


def run(applied: Vectors, *, weights: Vectors | None = None, **traits: Any) -> Trace:
    """Return a run of one step of two ranks, each with two micro-batches."""
    held = records(weights or {name: np.ones(SIZE) for name in NAMES})
    base = trace_of([{}])

    def changed(event: Any) -> Any:
        if isinstance(event, Shard):
            return replace(event, gradient=records(BATCHES[event.shard]))
        if isinstance(event, Update):
            return replace(event, gradient=records(applied), weights=held)
        return replace(event, weights=held) if isinstance(event, Start) else event

    events = tuple(map(changed, base.events))
    return replace(base, events=events, traits=replace(base.traits, **traits))


def changes(
    applied: Vectors, other: Vectors, *, bound: float = BOUND, **given: Any
) -> dict[str, explanations.Change]:
    """Return what is changed in a run that applies `applied`, beside one that applies `other`."""
    trace = run(applied, **given)
    update, model = (traces.one(one, Update, rank=0) for one in (trace, run(other)))
    return explanations.changes(trace, update, model, bound)


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
    whole = sum_of_shares(*BATCHES, shares=shares)
    assert changes(whole, sum_of_shares(whole, NOISE)) == {}
    assert [*changes(with_row(whole), sum_of_shares(whole, NOISE))] == ["b"]


def test_what_both_runs_change() -> None:
    """A script that changes gradients on purpose does so on one worker, too."""
    assert changes(with_row(RIGHT), with_row(NEAR)) == {}


def test_runs_that_differ_by_something_else() -> None:
    """Where the change is lost in what else differs, nothing is known."""
    assert changes(with_row(RIGHT), sum_of_shares(RIGHT, NOISE, shares=(1.0, 20.0))) == {}


def test_micro_batches_that_are_not_seen_rightly() -> None:
    """Where two runs agree, their gradients are right whatever the micro-batches are."""
    other = {**RIGHT, "b": BATCHES[0]["b"]}
    assert changes(other, sum_of_shares(other, NOISE)) == {}


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
    found = broken(compared(with_row(RIGHT)))
    assert (found.step, found.tensor, found.element) == (0, "b", 7)
    assert "in a part that none of its micro-batches contributed, allowed 0.0001" in found.message
    assert compared(RIGHT).broken is None


def test_gradients_that_are_sent_in_16_bits() -> None:
    """How their sums are rounded is declared."""
    assert compared(with_row(RIGHT), compressed="bfloat16").broken is None
