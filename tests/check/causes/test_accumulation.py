"""Applied gradients that are not the sum of their micro-batches, and what explains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import accumulation
from entrenar_py.check.clauses import CHECKS, weighting
from entrenar_py.check.evidence.needs import ALONE, SHORTENED, Runs
from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Tally, Verdict
from tests import traces
from tests.check.clauses.micro_batch_traces import (
    MICRO_BATCHES,
    SHAPES,
    STEPS,
    Vectors,
    plus,
    summed,
    times,
    trace_of,
)
from tests.traces import altered, falsified, left_open

FIRST = summed(0)
SECOND = summed(1, which=slice(-1, None))
LAST = summed(0, which=slice(-1, None))
SHORT = times(0.1, plus(FIRST, summed(1)))


@pytest.mark.parametrize(
    ("applied", "changes", "words"),
    [
        (plus(FIRST, summed(1)), {}, "gradients are not cleared since step 0"),
        (SHORT, {"kept": {"a": 0, "b": 0}}, "gradients are not cleared since step 0"),
        (FIRST, {}, "is step 0's gradient again"),
        (times(0.3, FIRST), {}, "is the gradient of step 0's samples"),
        (
            plus(summed(1, which=slice(None, 1)), LAST),
            {},
            "all but the last of 2 micro-batches, and over the last of step 0",
        ),
        (summed(1, which=slice(-1, None)), {}, "is the sum over the last of 2 micro-batches"),
        (summed(1, which=slice(None, 1)), {}, "is the sum over the first of 2 micro-batches"),
        (summed(1, ranks=[1]), {}, "is the gradient of rank 1's samples alone"),
        (times(2, summed(1), "a"), {}, "twice as large (world_size or accumulation)"),
        (
            plus(summed(1), summed(1, ranks=[1])),
            {},
            "contains the gradient of rank 1's samples twice",
        ),
        (plus(summed(1), SECOND), {}, "contains the gradient of micro-batch 1 of each rank twice"),
        (plus(summed(1), LAST), {}, "and the last of 2 backward passes of step 0"),
        (
            plus(summed(1), LAST, FIRST),
            {},
            "the last of 2 backward passes of step 0, and what step",
        ),
        ({**plus(summed(1), LAST), "b": summed(1)["b"]}, {}, "the last of 2 backward passes of st"),
    ],
)
def test_what_is_exact_and_wrong_is_a_counterexample(
    applied: Vectors, changes: dict[str, Any], words: str
) -> None:
    """The first step that has it is named, and what it could mean."""
    broken = falsified("weighting", trace_of([FIRST, applied], **changes))
    assert broken.step == 1
    assert broken.rank == 0
    assert words in broken.message


MEANS = {name: value - value.mean() for name, value in summed(1).items()}
NOISE = plus(summed(1), times(0.1, summed(2)))


@pytest.mark.parametrize(
    "applied",
    [
        MEANS,  # gradient centralisation
        NOISE,
        {**summed(1), "a": summed(1)["a"] * np.float32(0.37)},  # a limit for each layer
        {name: np.sign(value) for name, value in summed(1).items()},
        {**summed(1), "b": 0 * summed(1)["b"]},  # a layer that rests
        plus(times(0.9, FIRST), summed(1)),  # momentum by hand
        plus(times(0.9, LAST), summed(1)),
        plus(summed(1), times(0.5, summed(1, ranks=[1]))),  # ranks of other weights
        summed(1, ranks=[0]),  # reduced in the optimizer's step
    ],
)
def test_what_may_be_on_purpose_is_left_open(applied: Vectors) -> None:
    """Scripts change gradients as they like; without obs.reduced() that is no counterexample."""
    reason = left_open("weighting", trace_of([FIRST, applied]))
    assert "obs.reduced()" in reason or "F-DP-001" in reason


def test_one_of_two_optimizers_steps_less_often() -> None:
    """It applies the passes of several steps; the sum of others is still judged.

    If it stepped in each step, its gradient was not cleared.
    """
    piled = {**summed(1), "b": (summed(0)["b"] + summed(1)["b"])}
    steps = [{"a": summed(0)["a"]}, piled]
    reason = left_open("weighting", trace_of(steps, kept={"b": 0}))
    assert "the gradient of b also contains passes of earlier steps" in reason
    broken = falsified("weighting", trace_of([summed(0), piled], kept={"b": 0}))
    assert "not cleared since step 0" in broken.message
    mixed = {**piled, "a": summed(0)["a"]}
    falsified("weighting", trace_of([steps[0], mixed], kept={"b": 0}))


def test_a_declared_sum_must_be_the_sum() -> None:
    """A gradient that obs.reduced() recorded is that of the whole batch."""
    trace = trace_of([FIRST, MEANS], grad_norm=1.0, applied_norm=1.0)
    falsified("weighting", trace)


def test_a_step_without_a_backward_pass() -> None:
    """A step without micro-batches that applies the earlier gradient again is told as that."""
    trace = trace_of([FIRST, FIRST, summed(2)])
    events = [e for e in trace.events if not isinstance(e, Shard) or e.step != 1]
    broken = falsified("weighting", replace(trace, events=tuple(events)))
    assert broken.step == 1
    assert "stepped without a backward pass since step 0" in broken.message


def test_a_step_without_a_backward_pass_at_the_end_of_an_epoch() -> None:
    """A run with short epochs shows it, if the others don't come to the end of one.

    What is open in it alone leaves nothing open.
    """
    usual = trace_of([FIRST, summed(1), summed(2)])
    invariant = traces.clause("weighting", None)
    judge = CHECKS["weighting"].judge
    right = judge(invariant, Runs(usual))
    short = trace_of([FIRST, FIRST, summed(2)])
    events = [e for e in short.events if not isinstance(e, Shard) or e.step != 1]
    short = replace(short, events=tuple(events))
    broken = traces.broken(judge(invariant, Runs(usual, witnesses={SHORTENED: (short,)})))
    assert "stepped without a backward pass since step 0" in broken.message
    open_alone = Runs(usual, witnesses={SHORTENED: (trace_of([FIRST, MEANS]),)})
    assert judge(invariant, open_alone).reason == right.reason


def test_a_step_that_only_makes_the_optimizers_state() -> None:
    """Weights must not move without a backward pass; nothing is said if they don't."""
    zero = {name: 0 * value for name, value in FIRST.items()}
    trace = trace_of([FIRST, zero, summed(2)])
    events = [e for e in trace.events if not isinstance(e, Shard) or e.step != 1]
    probe = replace(trace, events=tuple(events))
    broken = falsified("weighting", probe)
    assert (broken.step, broken.tensor) == (1, "a")
    assert "moved without a backward pass" in broken.message
    before = traces.one(probe, Update, step=0).weights
    rests = traces.altered(probe, Update, {"step": 1}, weights=before)
    assert traces.judge("weighting", [rests]).verdict is not Verdict.FALSIFIED


def test_momentum_by_hand_is_not_a_gradient_that_was_kept() -> None:
    """What is added with another factor than the sum over ranks is left open."""
    kept = plus(times(0.9, FIRST), summed(1))
    finding = traces.judge("weighting", [trace_of([FIRST, kept], kept={"a": 0, "b": 0})])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert any(
        "were neither cleared nor overwritten since step 0" in note for note in finding.notes
    )


def test_a_gradient_that_the_script_took_away_is_noted() -> None:
    """The other tensors are compared."""
    taken = trace_of([FIRST, {"a": summed(1)["a"]}])
    finding = traces.judge("weighting", [taken])
    assert finding.verdict is not Verdict.FALSIFIED
    assert "the script removed the gradient of b before the update of step 1" in finding.notes


def test_a_clipped_sum_is_left_alone() -> None:
    """Clipping by the norm divides all tensors by one number, another one in each step."""
    trace = trace_of([times(0.5, FIRST), times(0.25, summed(1)), summed(2)])
    finding = traces.judge("weighting", [trace])
    assert finding.verdict is not Verdict.FALSIFIED
    assert finding.compared


def test_micro_batches_that_were_dropped_are_no_part_of_the_sum() -> None:
    """Dropped once on purpose: a note. Dropped in most steps: cleared in the loop."""
    last = slice(-1, None)
    applied = [FIRST, summed(1, which=last), summed(2)]
    once = trace_of(applied)
    held = dict.fromkeys(SHAPES, (1,))
    events = [_holding(event, held, {1}) for event in once.events]
    finding = traces.judge("weighting", [replace(once, events=tuple(events))])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("its samples are counted in no step" in note for note in finding.notes)
    often = trace_of([FIRST, summed(1, which=last), summed(2, which=last)])
    events = [_holding(event, held, {1, 2}) for event in often.events]
    broken = falsified("weighting", replace(often, events=tuple(events)))
    assert (broken.step, broken.shard) == (1, 0)
    assert "cleared between the micro-batches" in broken.message
    by_epoch = [
        replace(event, epoch=event.step + event.shard % MICRO_BATCHES)
        if isinstance(event, Shard)
        else event
        for event in events
    ]
    finding = traces.judge("weighting", [replace(often, events=tuple(by_epoch))])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("that an epoch left for no step" in note for note in finding.notes)


def _holding(event: Event, held: Mapping[str, tuple[int, ...]], steps: set[int]) -> Event:
    if not isinstance(event, Update) or event.step not in steps:
        return event
    before = event.rank * MICRO_BATCHES
    return replace(event, summed={n: tuple(before + i for i in at) for n, at in held.items()})


def test_a_tensor_that_some_micro_batches_have_no_gradient_for() -> None:
    """A part of a model that only the last micro-batch trains, clipped apart, lacks no other."""
    last = times(0.37, summed(1, which=slice(-1, None)))
    trace = trace_of([FIRST, {**summed(1), "b": last["b"]}])
    left_open(
        "weighting",
        altered(
            trace,
            Shard,
            {"step": 1, "shard": lambda shard: shard % MICRO_BATCHES == 0},
            gradient=lambda event: {"a": event.gradient["a"]},
        ),
    )


def test_gradients_of_an_evaluation_are_not_to_be_applied() -> None:
    """A pass in evaluation mode, beside others in training mode, is named if it was not cleared.

    A model that trains in evaluation mode in all passes may be meant so, and a gradient that was
    cleared is in no sum.
    """
    many = _evaluating(trace_of([summed(0), summed(1), summed(2)]), {1})
    broken = falsified("weighting", many)
    assert broken.step == 1
    assert "2 backward passes in evaluation mode and 2 in training mode" in broken.message
    alike = _evaluating(trace_of([summed(0), summed(1), summed(2)]), {0, 1})
    assert traces.judge("weighting", [alike]).verdict is not Verdict.FALSIFIED
    cleared = trace_of([summed(0), summed(1, which=slice(None, 1)), summed(2)])
    events = [_holding(e, dict.fromkeys(SHAPES, (0,)), {1}) for e in cleared.events]
    cleared = _evaluating(replace(cleared, events=tuple(events)), {1})
    assert traces.judge("weighting", [cleared]).verdict is not Verdict.FALSIFIED


def _evaluating(trace: Trace, numbers: set[int]) -> Trace:
    """Return `trace` with the micro-batches `numbers` of each rank's step 1 in evaluation mode."""
    return altered(
        trace,
        Shard,
        {"step": 1, "shard": lambda shard: shard % MICRO_BATCHES in numbers},
        evaluating=True,
    )


def test_a_change_that_one_worker_makes_too() -> None:
    """Then the sum is right, unless the change may hide a micro-batch that is missing."""
    rescaled: list[Vectors] = [{**summed(n), "b": 0.3 * summed(n)["b"]} for n in range(STEPS)]
    noisy: list[Vectors] = [
        plus(summed(n), {"a": np.ones(6), "b": np.zeros(4)}) for n in range(STEPS)
    ]
    for applied, of_one_worker, verdict in (
        (rescaled, rescaled, Verdict.HELD),
        (noisy, noisy, Verdict.INCONCLUSIVE),
        (rescaled, [times(2, one, "b") for one in rescaled], Verdict.FALSIFIED),
    ):
        runs = Runs(trace_of(applied), {ALONE: (_on_one_worker(of_one_worker),)})
        finding = traces.judge("weighting", runs)
        assert finding.verdict is verdict, finding.reason


def _on_one_worker(applied: list[Vectors]) -> Trace:
    """Return the run of `trace_of` by one rank."""
    trace = trace_of(applied)
    events = [
        replace(event, rank=0) if isinstance(event, Shard) else event
        for event in trace.events
        if isinstance(event, Shard) or not getattr(event, "rank", 0)
    ]
    subject = trace.scenario.with_(world_size=1, accumulation=4)
    return replace(trace, scenario=subject, events=tuple(events))


def test_a_gradient_that_may_have_been_kept() -> None:
    """It is the one before plus this step's. One that was overwritten is another one."""
    later: list[Vectors] = [plus(FIRST, summed(1)), {n: np.sign(v) for n, v in FIRST.items()}]
    for applied, is_kept in zip(later, (True, False), strict=True):
        trace = trace_of([FIRST, applied], kept={"a": 0, "b": 0})
        update = traces.one(trace, Update, step=1, rank=0)
        assert accumulation.is_kept(trace, update, summed(1), applied, 1e-4) is is_kept


@pytest.mark.parametrize(("kept", "is_found"), [({"a": 0, "b": 0}, True), ({}, False)])
def test_one_worker_shows_what_several_never_clear(kept: dict[str, int], is_found: bool) -> None:
    """Ranks that show no micro-batch's gradient are judged by it, if they clear nothing either."""
    piled = [FIRST, plus(FIRST, summed(1)), plus(plus(FIRST, summed(1)), summed(2))]
    alone = trace_of(piled, kept={"a": 0, "b": 0})
    several = trace_of(piled, kept=kept)
    runs = Runs(altered(several, Shard, {}, gradient={}), {ALONE: (alone,)})
    tally = Tally("F-TI-001", observed=True)
    weighting._left_in_alone(tally, runs)
    assert (tally.broken is not None) is is_found
    if tally.broken is not None:
        assert "gradients are not cleared since step 0" in tally.broken.message


# --- own sums -------------------------------------------------------------------------------------
# Micro-batches that a script adds up in a buffer of its own count as applied.


# The parameters' own gradients held the last micro-batch of each rank alone.
SECOND_PASSES: dict[str, Any] = {"summed": dict.fromkeys(SHAPES, (1, 3))}


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_sums_of_its_own(factor: float) -> None:
    """The optimizer got all micro-batches, clipped or not."""
    whole = [times(factor, summed(step)) for step in range(STEPS)]
    before = trace_of(whole, **SECOND_PASSES)
    falsified("weighting", before)
    finding = traces.judge("weighting", [accumulation.seen_through(before)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert finding.compared > 0


def test_micro_batches_that_are_cleared() -> None:
    """The optimizer got the last one alone."""
    last = trace_of([summed(step, which=slice(1, None)) for step in range(STEPS)], **SECOND_PASSES)
    assert accumulation.seen_through(last) is last
    falsified("weighting", last)


def test_gradients_that_are_asked_for_are_no_micro_batches() -> None:
    """`torch.autograd.grad` in an inner loop adds to nothing; its samples are the micro-batch's."""
    last = trace_of([summed(step, which=slice(1, None)) for step in range(STEPS)], **SECOND_PASSES)
    seen = accumulation.seen_through(
        altered(last, Shard, {}, loss_sum=lambda event: 1.0 if event.shard % 2 else None)
    )
    assert {shard.shard for shard in seen.of(Shard) if shard.step} == {1, 3}
    drawn = {shard.step: {*shard.ids} for shard in last.of(Shard) if shard.rank == 0}
    kept = {shard.step: {*shard.ids} for shard in seen.of(Shard) if shard.rank == 0}
    assert all(drawn[step] <= kept[step] for step in drawn)
    weights = {(s.step, s.weight, s.loss_sum) for s in seen.of(Shard) if s.step}
    assert weights == {(step, 2.0, 2.0) for step in range(1, STEPS)}
