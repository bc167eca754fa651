"""By which numbers micro-batches' losses are divided, where a script doesn't report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.check.clauses.micro_batch_traces import SHAPES, STEPS, summed, times, trace_of
from tests.traces import altered, falsified, left_open, records

Terms = tuple[tuple[float, ...], ...]
MEAN: Terms = ((8.0, 1 / 8, 8.0),)
HALF: Terms = ((8.0, 1 / 16, 2.0, 8.0),)  # divided by 2 micro-batches
COUNTED = "they are added without division"
UNKNOWN = "it is unknown by which number it divides their losses"


def run(*terms: Terms, steps: int = STEPS) -> Trace:
    """Return a run whose ranks have two micro-batches with these terms, or twice the same."""
    of_rank = terms if len(terms) == 2 else terms * 2
    trace = trace_of([summed(step) for step in range(steps)], terms=[of_rank, of_rank])
    return traces.was(trace, losses="backward")


def reason(trace: Trace) -> str:
    return traces.judge("weighting", [trace]).reason


@pytest.mark.parametrize(
    "terms",
    [
        [HALF],
        [((8.0, 0.9 / 16, 2.0, 8.0), (24.0, 0.1 / 48, 2.0, 24.0))],  # smoothed labels
        [((8.0, 0.25 / 16, 2.0, 8.0),)],  # a weight of its own
        [((5.0, 1 / 8, 8.0),), ((3.0, 1 / 8, 8.0),)],  # tokens of the step, of each rank
        [((5.0, 1 / 16, 16.0),), ((3.0, 1 / 16, 16.0),)],  # and of all ranks
        [((5.0, 1 / 10, 20.0),), ((3.0, 1 / 10, 20.0),)],  # labels of both, before their shift
        [((8.0, 1.0),)],  # a sum
        [((0.0, 0.5, 2.0),)],  # over nobody knows what
    ],
)
def test_losses_that_are_divided_by_their_number_are_known(terms: Sequence[Terms]) -> None:
    """Each way to take a mean over the step, or its sum, needs no other number to compare with."""
    assert "a rank adds up" not in reason(run(*terms))


@pytest.mark.parametrize(
    "terms",
    [
        ((8.0, 1 / 16, 8.0),),  # 0.5 times the loss is no division by two micro-batches
        ((8.0, 1 / 16, 2.0, 8.0), (8.0, 1 / 16, 2.0, 8.0)),  # the mean of two losses
        ((8.0, 1 / 16, 2.0, 8.0), (8.0, 1 / 8, 8.0)),  # one of them is divided
    ],
)
def test_means_that_are_added_stay_open(terms: Terms) -> None:
    """The sum of the means may be meant."""
    assert COUNTED in reason(run(terms))


def of_loaders(trace: Trace, *, apart: bool) -> Trace:
    """Return a run whose micro-batches are of one loader, or whose second ones are of another."""
    return altered(trace, Shard, {}, epoch=lambda event: event.shard % 2 if apart else 0)


def test_means_of_one_loaders_batches_that_are_added_are_wrong() -> None:
    """Ranks' means are averaged, so the sum over micro-batches is no design."""
    found = traces.judge("weighting", [of_loaders(run(MEAN), apart=False)])
    assert found.verdict is Verdict.FALSIFIED
    assert (
        "the sum over a rank's 2 micro-batches, 2 times the gradient of the mean loss"
        in found.reason
    )


def test_a_step_without_recorded_gradients_leaves_the_others_wrong() -> None:
    """FSDP2 shards its gradients while the first pass runs, so the first step may have none."""
    trace = of_loaders(run(MEAN), apart=False)
    found = traces.judge("weighting", [altered(trace, Shard, {"step": 0, "shard": 0}, gradient={})])
    assert found.verdict is Verdict.FALSIFIED


def test_means_without_a_loader_may_be_those_of_several_tasks() -> None:
    of_content = traces.was(of_loaders(run(MEAN), apart=False), sample_ids="content")
    assert COUNTED in reason(of_content)


def test_means_of_rows_that_one_line_selects_are_wrong() -> None:
    """They are of one source, as those of a loader are."""
    selected = traces.was(
        of_loaders(run(MEAN), apart=False), sample_ids="content", selects="t.py:3", one_source=True
    )
    finding = traces.judge("weighting", [selected])
    assert finding.verdict is Verdict.FALSIFIED
    assert "the sum over a rank's 2 micro-batches" in finding.reason


def test_means_of_several_loaders_are_several_losses() -> None:
    assert "a rank adds up" not in reason(of_loaders(run(MEAN), apart=True))


def four(terms: Terms) -> Trace:
    """Return a run whose ranks have four micro-batches with these terms."""
    events: list[Event] = []
    for event in run(terms).events:
        events.append(event)
        if isinstance(event, Shard):
            ids = tuple(number + 1000 for number in event.ids)
            events.append(replace(event, shard=event.shard + 4, ids=ids))
    return replace(run(terms), events=tuple(events))


def test_a_loss_that_is_divided_by_the_micro_batches_twice() -> None:
    """The script divides, and an engine divides what it is given: the step is a quarter of one."""
    broken = falsified("weighting", four(((8.0, 1 / 128, 4.0, 4.0, 8.0),)))
    assert broken.step == 0
    assert "4 micro-batches has its loss divided by 4 twice" in broken.message


def test_two_micro_batches_that_are_divided_by_two_twice() -> None:
    """On two ranks they count as one mean does that is added up, but ranks were averaged."""
    broken = falsified("weighting", run(((8.0, 1 / 32, 2.0, 2.0, 8.0),)))
    assert "2 micro-batches has its loss divided by 2 twice" in broken.message


@pytest.mark.parametrize(
    "trace",
    [
        four(((8.0, 1 / 32, 4.0, 8.0),)),
        four(((4.0, 1 / 16, 4.0, 4.0),)),  # a mean over four elements
        four(((16.0, 1 / 64, 4.0, 4.0, 4.0),)),  # over four rows of four elements
        four(((8.0, 1 / 64, 4.0, 2.0, 8.0),)),  # half of a squared error
        run(((8.0, 1 / 16, 2.0, 8.0),)),
    ],
    ids=["once", "elements", "rows", "half", "two"],
)
def test_other_divisions_by_that_number(trace: Trace) -> None:
    """The number may be that of elements or rows, and two micro-batches may be halves."""
    assert traces.judge("weighting", [trace]).verdict is not Verdict.FALSIFIED


def test_without_terms_the_number_is_unknown() -> None:
    assert UNKNOWN in reason(run(()))
    assert UNKNOWN in reason(run(((8.0, float("nan")),)))


def other_size(trace: Trace, kept: int, step: int = 1) -> Trace:
    """Return the run with 1 or 3 micro-batches of each rank in a step."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard) and event.step == step:
            if event.shard % 2 == 0 or kept > 1:
                events.append(event)
            if event.shard % 2 and kept > 2:
                events.append(replace(event, shard=event.shard + 4, epoch=1))
        else:
            events.append(event)
    of_step = [one for one in events if isinstance(one, Shard) and one.step == step]
    total = {
        name: np.sum([one.gradient[name].values() for one in of_step], axis=0) / 2  # type: ignore[arg-type]
        for name in SHAPES
    }
    trace = replace(trace, events=tuple(events))
    for rank in (0, 1):
        where = {"step": step, "rank": rank}
        trace = traces.altered(trace, Update, where, gradient=records(total))
    return trace


@pytest.mark.parametrize(("kept", "words"), [(1, "that of full steps only"), (3, "left for the")])
def test_a_window_of_another_length_that_is_divided_by_the_usual_one(kept: int, words: str) -> None:
    """A step of more or fewer micro-batches is divided by its own number."""
    broken = falsified("weighting", other_size(run(HALF), kept))
    assert broken.step == 1
    assert f"{kept} micro-batches of a rank are divided by the same number as 2" in broken.message
    assert words in broken.message


def test_a_window_of_another_length_that_is_divided_by_its_own() -> None:
    """A tail that is divided by its own length holds, and one that isn't measured stays open."""
    trace = other_size(run(HALF), 1)
    of_step = [one for one in trace.of(Shard) if one.step == 1]
    known, unknown = trace, trace
    for shard in of_step:
        where = {"step": 1, "shard": shard.shard}
        known = traces.altered(known, Shard, where, terms=MEAN)
        unknown = traces.altered(unknown, Shard, where, terms=())
    words = "steps have 2 or 4 micro-batches, and it is unknown by which number"
    assert words not in reason(known)
    assert traces.judge("weighting", [known]).verdict is not Verdict.FALSIFIED
    assert words in reason(unknown)


def test_added_means_of_two_lengths_stay_open() -> None:
    """Nothing is divided, so nothing is divided by the wrong number."""
    assert "steps have 2 or 4 micro-batches" in reason(other_size(run(MEAN), 1))


def fewer_samples(trace: Trace) -> Trace:
    """Return the run with another sample in every first micro-batch."""
    return altered(
        trace,
        Shard,
        {"shard": lambda shard: shard % 2 == 0},
        ids=lambda e: (*e.ids, e.ids[0] + 100),
        weight=2.0,
    )


def test_a_mean_of_means_over_other_numbers_of_samples() -> None:
    """A short micro-batch that counts as a full one is a counterexample at its place."""
    means: tuple[Terms, Terms] = (((2.0, 0.25, 2.0, 2.0),), ((1.0, 0.5, 2.0, 1.0),))
    broken = falsified("weighting", fewer_samples(run(*means)))
    assert (broken.step, broken.shard) == (0, 0)
    assert "counts 0.75 times as much as its share of 2 in 6 samples" in broken.message
    right: tuple[Terms, Terms] = (((2.0, 1 / 3, 3.0),), ((1.0, 1 / 3, 3.0),))
    assert traces.judge("weighting", [fewer_samples(run(*right))]).verdict is not Verdict.FALSIFIED
    declared = traces.was(fewer_samples(run(*means)), loss_over="micro-batch")
    assert traces.judge("weighting", [declared]).verdict is not Verdict.FALSIFIED


def test_networks_that_are_trained_in_turn_have_numbers_of_their_own() -> None:
    """Two losses of one network and one of another are steps of one size each."""
    trace = run(MEAN)
    for shard in trace.of(Shard):
        name = "a" if shard.shard % 2 else "b"
        gradient = {name: shard.gradient[name]}
        where = {"step": shard.step, "shard": shard.shard}
        trace = traces.altered(trace, Shard, where, gradient=gradient, terms=())
    short = traces.without(trace, Shard, step=1, shard=3)
    assert "a rank adds up" not in reason(trace)
    assert "steps have" not in reason(trace)
    assert "steps have 1 or 2 micro-batches" in reason(short)


def test_means_over_other_numbers_of_tokens_stay_open() -> None:
    """Equal numbers of samples with other numbers of tokens may rightly count alike."""
    means: tuple[Terms, Terms] = (((7.0, 1 / 14, 2.0, 7.0),), ((5.0, 1 / 10, 2.0, 5.0),))
    assert "those of 5, 7 elements count equally" in left_open("weighting", run(*means))
    declared = traces.was(run(*means), loss_over="micro-batch")
    assert "count equally" not in reason(declared)


def of_tokens(counts: Mapping[int, Sequence[int]], divisors: Mapping[int, Sequence[int]]) -> Trace:
    """Return a run with smoothed labels, whose sums are over tokens, by step and micro-batch."""
    trace = run(((1.0, 1.0),), steps=len(counts))
    for step, shard in product(counts, range(4)):
        count, number = float(counts[step][shard]), float(divisors[step][shard])
        terms: Terms = ((count, 1.8 / number, number), (count, 0.2 / 30 / number, number))
        trace = traces.altered(trace, Shard, {"step": step, "shard": shard}, terms=terms)
    return trace


TOKENS = {0: (7, 5, 6, 9), 1: (8, 8, 4, 3), 2: (5, 6, 7, 8)}


def test_sums_divided_by_the_tokens_of_the_step_are_known_under_smoothed_labels() -> None:
    """Two terms count as much in each step, of however many tokens; without a change it is open."""
    of_step = {step: [sum(counts)] * 4 for step, counts in TOKENS.items()}
    right = other_size(of_tokens(TOKENS, of_step), 1)
    short = {0: TOKENS[0], 1: (8, 0, 4, 0), 2: TOKENS[2]}
    own = other_size(of_tokens(short, {s: [sum(c)] * 4 for s, c in short.items()}), 1)
    assert "steps have" not in reason(own)
    assert "steps have 2 or 4 micro-batches" in reason(right)  # divided by tokens that are left out


@pytest.mark.parametrize(
    ("divided_by", "is_wrong"), [("window", True), ("step", False), ("constant", False)]
)
def test_a_window_that_is_applied_in_two_steps(divided_by: str, is_wrong: bool) -> None:
    """Each divides by the tokens of both: an engine stepped before the window was whole.

    Accelerate does where a loader ends, as soon as its last batch was fetched.
    """
    counts = {0: TOKENS[0], 1: TOKENS[1], 2: (8, 0, 6, 0), 3: (5, 0, 7, 0)}
    own = {step: sum(of_step) for step, of_step in counts.items()}
    window = own | {2: own[2] + own[3], 3: own[2] + own[3]}
    divisors = {"window": window, "step": own, "constant": dict.fromkeys(own, 26)}[divided_by]
    trace = of_tokens(counts, {step: [number] * 4 for step, number in divisors.items()})
    trace = other_size(other_size(trace, 1, step=2), 1, step=3)
    finding = traces.judge("weighting", [trace])
    assert (finding.verdict is Verdict.FALSIFIED) is is_wrong
    if is_wrong:
        assert "steps 2, 3 each divide their losses by the 26 elements of both" in finding.reason


def test_each_rank_that_divides_by_its_own_tokens_is_wrong() -> None:
    """Micro-batches of unlike numbers of tokens are one mean on each rank; ranks count alike."""
    own = {s: [c[0] + c[1]] * 2 + [c[2] + c[3]] * 2 for s, c in TOKENS.items()}
    trace = of_tokens(TOKENS, own)
    broken = falsified("weighting", trace)
    assert (broken.step, broken.rank) == (0, 0)
    assert "count 1.12 times as much as its share of 12 in 27 elements" in broken.message
    declared = traces.was(trace, loss_over="micro-batch")
    assert traces.judge("weighting", [declared]).verdict is not Verdict.FALSIFIED
    one_each = {s: [*c] for s, c in TOKENS.items()}
    assert traces.judge("weighting", [of_tokens(TOKENS, one_each)]).verdict is not Verdict.FALSIFIED


def divided_afterwards(numbers: Sequence[float], counts: Mapping[int, Sequence[int]]) -> Trace:
    """Return a run of means times their tokens, whose gradients are divided by a step's number."""
    trace = run(MEAN)
    for step, shard in product(counts, range(4)):
        count = float(counts[step][shard])
        where = {"step": step, "shard": shard}
        trace = traces.altered(trace, Shard, where, terms=((count, 1.0, count),))
    for step, rank in product(counts, range(2)):
        mean = times(2 / numbers[step], summed(step))
        where = {"step": step, "rank": rank}
        clipped = records(times(0.5 + 0.1 * step, mean))
        trace = traces.altered(trace, Update, where, gradient=clipped, unclipped=records(mean))
    return trace


@pytest.mark.parametrize("numbers", [[sum(c) for c in TOKENS.values()], [4.0] * STEPS])
def test_sums_whose_gradients_are_divided_after_the_last_pass(numbers: Sequence[float]) -> None:
    """By the tokens of the step, or by one number in each step, which another rate makes good."""
    finding = traces.judge("weighting", [divided_afterwards(numbers, TOKENS)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert "a rank adds up" not in finding.reason


@pytest.mark.parametrize(
    ("numbers", "whose"),
    [
        ([c[1] + c[3] for c in TOKENS.values()], "the last micro-batch of each rank"),
        ([c[0] + c[1] for c in TOKENS.values()], "rank 0"),
        ([27, 50, 76], "all steps so far"),
    ],
)
def test_gradients_that_are_divided_by_other_tokens(numbers: Sequence[float], whose: str) -> None:
    """The count is overwritten, not summed over ranks, or never set to zero again."""
    broken = falsified("weighting", divided_afterwards(numbers, TOKENS))
    assert f"is divided by the number of elements of {whose}" in broken.message


def test_gradients_that_are_divided_by_a_number_of_no_count_are_left_alone() -> None:
    """Nobody knows what a script counts there."""
    finding = traces.judge("weighting", [divided_afterwards([5, 17, 40], TOKENS)])
    assert finding.verdict is not Verdict.FALSIFIED


def zeroed(terms: Terms) -> Trace:
    """Return a run with these terms, and a last micro-batch of step 1 that is multiplied by 0."""
    dummy: Terms = ((terms[0][0], 0.0, *terms[0][2:]),)
    return traces.altered(run(terms), Shard, {"step": 1, "shard": 3}, terms=dummy)


def test_a_sum_that_is_multiplied_by_zero_leaves_the_others_known() -> None:
    """It is a batch that keeps a rank in step. Whether a mean counts it is another question."""
    assert "a rank adds up" not in reason(zeroed(((8.0, 1.0),)))
    assert "a rank adds up" in reason(zeroed(HALF))
