"""How much each micro-batch's loss counts in the gradient that is applied."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from entrenar_py.trace import Trace
from entrenar_py.verdict import Verdict
from tests.checks import traces
from tests.checks.micro_batch_traces import STEPS, Vectors, summed, times, trace_of

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
