"""Samples are weighted alike, as gradients and reported losses show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.shared.trace import Event, Shard, TensorRecord, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.check.clauses import micro_batch_traces
from tests.check.clauses.micro_batch_traces import SHAPES, STEPS, Vectors, summed, times, trace_of
from tests.traces import (
    altered,
    broken,
    falsified,
    held,
    in_bfloat16,
    left_open,
    records,
    scenario,
    without,
)

SUBJECT = scenario(detail="values")


def mean_of_means(trace: Trace, step: int) -> float:
    """Return the mean of the shards' mean losses, a typical bug."""
    means = [(s.loss_sum or 0.0) / s.weight for s in trace.of(Shard) if s.step == step and s.weight]
    return sum(means) / len(means)


def test_a_mean_of_means_is_found() -> None:
    """With unequal shards a mean of means is found."""
    trace = traces.run(scenario(num_shards=3))
    wrong = mean_of_means(trace, 1)
    changed = altered(trace, Update, {"step": 1, "rank": 2}, loss=wrong)
    found = falsified("weighting", changed)
    assert (found.step, found.rank, found.got) == (1, 2, repr(wrong))
    assert "weighted mean" in found.message


def test_a_weight_that_is_not_the_shards() -> None:
    """A rank that counts only its own samples is found."""
    changed = altered(traces.run(SUBJECT), Update, {"step": 2, "rank": 1}, weight=1.0)
    found = falsified("weighting", changed)
    assert (found.step, found.rank, found.expected, found.got) == (2, 1, "2.0", "1.0")


@pytest.mark.parametrize("step", [0, 2])
def test_gradients_are_the_single_devices(step: int) -> None:
    """A gradient weighted unlike the loss is found in its step, also in a short batch."""
    own, *others = traces.family("weighting", SUBJECT)
    bad = traces.swapping("gradient", "hidden1.bias", traces.values(1, 2, 3))
    changed = altered(own, Update, {"step": step, "rank": 1}, **bad)
    found = falsified("weighting", changed, *others)
    assert (found.step, found.rank, found.tensor) == (step, 1, "hidden1.bias")


def test_tokens_are_weighted() -> None:
    """A language model's loss is a mean over tokens, since its lines differ in length."""
    subject = scenario(workload="decoder", num_samples=5, num_steps=1, detail="values")
    held("weighting", *traces.family("weighting", subject))


def test_a_loss_that_overflowed_is_left_to_finiteness() -> None:
    """A non-finite loss is judged by F-DP-003, not here."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 3, "shard": 0}, loss_sum=math.nan)
    left_open("weighting", trace)


def test_without_an_oracle_the_gradient_is_unknown() -> None:
    """Losses alone don't show the weighting of gradients."""
    assert "the gradient's weighting is unknown" in left_open("weighting", traces.run(SUBJECT))


def test_without_shards_nothing_is_known() -> None:
    """A trainer without recorded shard losses is inconclusive."""
    trace = traces.run(SUBJECT)
    bare = replace(trace, events=tuple(e for e in trace.events if not isinstance(e, Shard)))
    left_open("weighting", bare)


def test_what_was_not_recorded() -> None:
    """Missing values, steps, weights and shards are each named, and nothing is falsified."""
    own, *others = traces.family("weighting", SUBJECT)
    bare = [replace(one, events=tuple(map(_digests, one.events))) for one in (own, *others)]
    for found, missing in (
        (
            bare,
            "record Update.gradient in both runs with values, record_tensor(array, values=True)",
        ),
        ([without(own, Update), *others], "record an Update for every rank and step"),
        ([without(own, Shard), *others], "no micro-batch of steps 0, 1, 2, 3, 4"),
        ([altered(own, Shard, {}, weight=0.0), *others], "no weight: record Shard.weight"),
    ):
        assert missing in left_open("weighting", *found)


def test_one_comparison_excuses_no_gap() -> None:
    """One rank without a gradient, a run without any, or one step without shards is missing, even
    if all else was compared.
    """
    own, one = traces.family("weighting", SUBJECT)[0], traces.run(SUBJECT.with_(world_size=1))
    oracle = traces.family("weighting", SUBJECT)[-1]
    bare = replace(own, events=tuple(map(_digests, own.events)))
    for found, missing in (
        ([altered(own, Update, {"rank": 1}, gradient={}), oracle], "rank 1 was not compared by gr"),
        ([bare, one, oracle], "record Update.gradient in both runs with values"),
        ([altered(own, Shard, {"step": 4}, gradient={}), oracle], "step 4 could not be added"),
        ([without(own, Shard, rank=1), oracle], "rank 1 made steps without a micro-batch"),
    ):
        assert missing in left_open("weighting", *found)


def test_gradients_of_copies_are_not_the_models() -> None:
    """An optimizer of copies applies gradients that the model's parameters don't have."""
    own, *others = traces.family("weighting", SUBJECT)
    bare = traces.was(altered(own, Update, {}, gradient={}), steps="copies")
    assert "the optimizer steps copies of the model's weights" in left_open(
        "weighting", bare, *others
    )


def test_a_gradient_of_samples_without_names_counts() -> None:
    """A shard without sample ids still counts in the sum."""
    own, *others = traces.family("weighting", SUBJECT)
    unnamed = altered(own, Shard, {"step": 1, "shard": 0}, ids=())
    assert "the samples of step 1 are unknown" in left_open("weighting", unnamed, *others)


def _digests(event: Event) -> Event:
    if not isinstance(event, Update):
        return event
    return replace(event, gradient={n: TensorRecord(r.digest) for n, r in event.gradient.items()})


def sent_in_bfloat16() -> Trace:
    """Return a run whose ranks round their gradients by hand."""
    applied = []
    for step in range(micro_batch_traces.STEPS):
        ranks = [micro_batch_traces.summed(step, ranks=[rank]) for rank in (0, 1)]
        terms = [{name: in_bfloat16(v) for name, v in own.items()} for own in ranks]
        applied.append(micro_batch_traces.plus(*terms))
    return micro_batch_traces.trace_of(applied)


def test_sums_in_bfloat16_are_compared_within_its_rounding() -> None:
    """Roundings of what ranks send are seen, and are wrong only where float32 is declared."""
    right = sent_in_bfloat16()
    assert "bfloat16" not in traces.judge("weighting", [right]).reason
    assert traces.judge("weighting", [right]).verdict is not Verdict.FALSIFIED
    declared = traces.was(right, compressed="float32")
    words = "sums of gradients are rounded to 16 bits, and float32 is declared"
    assert words in falsified("weighting", declared).message


def two_networks(factor: float) -> Trace:
    """Return a run of two networks, each trained by a micro-batch of its own.

    The second one's gradient has a `factor`.
    """
    local = micro_batch_traces.LOCAL
    own = {"a": 0, "b": 1}
    applied = [
        {
            name: np.float32(factor if name == "b" else 0.5)
            * np.sum([local[step][rank][at][name] for rank in (0, 1)], axis=0)
            for name, at in own.items()
        }
        for step in range(micro_batch_traces.STEPS)
    ]
    trace = micro_batch_traces.trace_of(applied)
    summed = {name: (at, at + 2) for name, at in own.items()}
    for step in range(micro_batch_traces.STEPS):
        for rank in (0, 1):
            trace = altered(trace, Update, {"step": step, "rank": rank}, summed=summed)
    return trace


def test_two_networks_may_each_be_clipped_by_its_own_norm() -> None:
    """Nothing adds their losses, so they may be divided by other numbers."""
    for factor in (0.5, 0.1):
        finding = traces.judge("weighting", [two_networks(factor)])
        assert finding.verdict is not Verdict.FALSIFIED
        assert "divided by one number" not in finding.reason
    one = traces.judge(
        "weighting",
        [
            micro_batch_traces.trace_of(
                [
                    micro_batch_traces.times(0.3, micro_batch_traces.summed(step), "b")
                    for step in range(micro_batch_traces.STEPS)
                ]
            )
        ],
    )
    assert "divided by one number" in one.reason


def test_shares_of_one_loss_at_two_weights_are_added_up() -> None:
    """A penalty of the gradient's norm takes a share of it before a climb, and one behind it."""
    shares = [((8.0, 0.6 / 8, 8.0),), ((8.0, 0.4 / 8, 8.0),)]
    finding = traces.judge(
        "weighting",
        [
            micro_batch_traces.trace_of(
                [*map(micro_batch_traces.summed, range(micro_batch_traces.STEPS))],
                terms=[shares, shares],
                mixed=("a", "b"),
            )
        ],
    )
    assert finding.counterexample is None
    assert finding.compared > 0


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_gradient_of_before_a_climb_stays_in(share: float) -> None:
    """Both passes of a sharpness-aware step count in full. A share of the first may be meant."""
    applied = [micro_batch_traces.summed(0)]
    for step in (1, 2):
        first, second = (micro_batch_traces.summed(step, which=slice(n, n + 1)) for n in (0, 1))
        applied.append({n: np.float32(share) * first[n] + second[n] for n in first})
    moved = micro_batch_traces.trace_of(applied, mixed=("a", "b"), climbed=())
    finding = traces.judge("weighting", [traces.was(moved, stepped_by="inner")])
    if share == 1.0:
        found = broken(finding)
        assert (found.step, found.tensor) == (1, "a")
        assert (
            "also contains the gradient of the pass before its weights were moved" in found.message
        )
    else:
        assert finding.verdict is Verdict.INCONCLUSIVE


def test_both_gradients_of_adversarial_training_are_added() -> None:
    """If only some weights were moved (FGM); if all were (AWP), it isn't told from a bug."""
    applied = [*map(summed, range(STEPS))]
    some = traces.judge("weighting", [trace_of(applied, mixed=("a",))])
    assert some.counterexample is None
    assert "before its weights were moved" not in some.reason
    assert any("as in adversarial training" in note for note in some.notes)
    assert "right in adversarial training (AWP), wrong in" in left_open(
        "weighting", trace_of(applied, mixed=("a", "b"))
    )


# --- what each reported loss counts ---------------------------------------------------------------

HALF = [[0.5, 0.5], [0.5, 0.5]]
WHOLE = [[1.0, 1.0], [1.0, 1.0]]


def run(
    slopes: Sequence[Sequence[float]], factors: Sequence[float] = (1, 1, 1), weight: float = 1.0
) -> Trace:
    """Return a run with micro-batches of `weight`; DistributedDataParallel divides by 2."""
    applied: list[Vectors] = [
        times(factor, summed(step)) for step, factor in zip(range(STEPS), factors, strict=True)
    ]
    return trace_of(applied, slopes=slopes, weight=weight)


@pytest.mark.parametrize("factors", [(1, 1, 1), (0.7, 0.2, 1)])
def test_shares_that_are_right_are_left_alone(factors: Sequence[float]) -> None:
    """Each loss is divided by the accumulation, and clipped or not."""
    finding = traces.judge("weighting", [run(HALF, factors)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert not any("in every step" in note for note in finding.notes)


def test_a_micro_batch_that_counts_too_much() -> None:
    """A mean of means is a counterexample at its micro-batch, clipped or not."""
    finding = traces.judge("weighting", [run([[0.5, 0.5], [0.5, 1.0]], (0.2, 0.7, 0.3))])
    broken = traces.broken(finding)
    assert (broken.step, broken.rank, broken.shard) == (0, 0, 0)
    assert "counts 0.8 times as much as its share, a weight of 1 in 4" in broken.message


def test_losses_of_single_samples_may_be_added() -> None:
    """Where each loss counts as a whole (weight 1), a sum may be meant: a note."""
    finding = traces.judge("weighting", [run(WHOLE)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("losses are added" in note for note in finding.notes)


def test_means_that_are_added() -> None:
    """Where each loss is a mean of 8, two of them are not to be added."""
    broken = falsified("weighting", run(WHOLE, weight=8.0))
    assert (broken.step, broken.got) == (0, "2")
    assert "in every step 2 times the gradient of the mean loss is applied" in broken.message


def test_a_loss_that_is_divided_twice_may_be_one_of_several_terms() -> None:
    """A constant factor below 1 is a note."""
    finding = traces.judge("weighting", [run([[0.25, 0.25], [0.25, 0.25]])])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("divided once too often" in note for note in finding.notes)


@pytest.mark.parametrize(("kept", "words"), [(1, "that of full steps only"), (3, "left for the")])
def test_steps_of_other_sizes(kept: int, words: str) -> None:
    """A step of more or fewer micro-batches is divided by the number of its own."""
    whole = run(HALF)
    events: list[Event] = []
    for event in whole.events:
        if isinstance(event, Shard) and event.step == 1:
            if event.shard % 2 == 0 or kept > 1:
                events.append(event)
            if event.shard % 2 and kept > 2:
                events.append(replace(event, shard=event.shard + 4, epoch=1))
        else:
            events.append(event)
    of_step = [one for one in events if isinstance(one, Shard) and one.step == 1]
    total = {
        name: np.sum([one.gradient[name].values() for one in of_step], axis=0) / 2  # type: ignore[arg-type]
        for name in SHAPES
    }
    trace = replace(whole, events=tuple(events))
    broken_run = traces.altered(
        traces.altered(trace, Update, {"step": 1, "rank": 0}, gradient=records(total)),
        Update,
        {"step": 1, "rank": 1},
        gradient=records(total),
    )
    broken = falsified("weighting", broken_run)
    assert broken.step == 1
    assert f"{2 * kept} micro-batches are divided by the same number as 4" in broken.message
    assert words in broken.message


def test_the_scale_of_losses_is_unknown() -> None:
    """Without obs.loss nobody knows what steps of several sizes divide their losses by."""
    trace = traces.was(run(HALF), losses="backward")
    reason = "steps have 2 or 4 micro-batches, and it is unknown by which number"
    assert reason not in traces.judge("weighting", [trace]).reason
    short = traces.without(traces.without(trace, Shard, step=1, shard=1), Shard, step=1, shard=3)
    assert reason in traces.judge("weighting", [short]).reason


def test_the_scale_of_losses_is_unknown_if_every_run_accumulates() -> None:
    """Two micro-batches a rank in every run don't show by which number losses are divided."""
    reason = "a rank adds up 2 micro-batches in each step of every run"
    assert reason not in traces.judge("weighting", [run(HALF)]).reason
    trace = traces.was(run(HALF), losses="backward")
    assert reason in traces.judge("weighting", [trace]).reason
