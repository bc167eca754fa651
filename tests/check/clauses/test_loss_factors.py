"""How much each micro-batch's loss counts in the gradient that is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import (
    SHAPES,
    STEPS,
    Vectors,
    records,
    summed,
    times,
    trace_of,
)

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
    assert "counts 0.8 times as much as its weight of 1 in 4" in broken.message


def test_losses_of_single_samples_may_be_added() -> None:
    """Where each loss counts as a whole (weight 1), a sum may be meant: a note."""
    finding = traces.judge("weighting", [run(WHOLE)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("losses are added" in note for note in finding.notes)


def test_means_that_are_added() -> None:
    """Where each loss is a mean of 8, two of them are not to be added."""
    broken = traces.broken(traces.judge("weighting", [run(WHOLE, weight=8.0)]))
    assert (broken.step, broken.got) == (0, "2")
    assert "in every step 2 times the gradient of the mean loss is applied" in broken.message


def test_a_loss_that_is_divided_twice_may_be_one_of_several_terms() -> None:
    """A constant factor below 1 is a note."""
    finding = traces.judge("weighting", [run([[0.25, 0.25], [0.25, 0.25]])])
    assert finding.verdict is not Verdict.FALSIFIED
    assert any("divided once too often" in note for note in finding.notes)


@pytest.mark.parametrize(("kept", "words"), [(1, "one of full steps alone"), (3, "left for the")])
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
    broken = traces.broken(traces.judge("weighting", [broken_run]))
    assert broken.step == 1
    assert f"{2 * kept} micro-batches are divided by the number that 4" in broken.message
    assert words in broken.message


def test_the_scale_of_losses_is_unknown() -> None:
    """Without obs.loss nobody knows what steps of several sizes divide their losses by."""
    trace = traces.was(run(HALF), losses="backward")
    reason = "steps have 2 or 4 micro-batches, and by which number"
    assert reason not in traces.judge("weighting", [trace]).reason
    short = traces.without(traces.without(trace, Shard, step=1, shard=1), Shard, step=1, shard=3)
    assert reason in traces.judge("weighting", [short]).reason


def test_the_scale_of_losses_is_unknown_if_every_run_accumulates() -> None:
    """Two micro-batches a rank in every run don't show by which number losses are divided."""
    reason = "a rank adds up 2 micro-batches in each step of every run"
    assert reason not in traces.judge("weighting", [run(HALF)]).reason
    trace = traces.was(run(HALF), losses="backward")
    assert reason in traces.judge("weighting", [trace]).reason
