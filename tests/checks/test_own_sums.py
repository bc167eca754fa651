"""Micro-batches that a script adds up in a buffer of its own count as applied."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.checks import own_sums
from entrenar_py.verdict import Verdict
from tests.checks import traces
from tests.checks.micro_batch_traces import SHAPES, STEPS, summed, times, trace_of

# The parameters' own gradients held the last micro-batch of each rank alone.
LAST: dict[str, Any] = {"summed": dict.fromkeys(SHAPES, (1, 3))}


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_sums_of_its_own(factor: float) -> None:
    """The optimizer got all micro-batches, clipped or not."""
    whole = [times(factor, summed(step)) for step in range(STEPS)]
    before = trace_of(whole, **LAST)
    assert traces.judge("weighting", [before]).verdict is Verdict.FALSIFIED
    finding = traces.judge("weighting", [own_sums.seen_through(before)])
    assert finding.verdict is not Verdict.FALSIFIED
    assert finding.compared > 0


def test_micro_batches_that_are_cleared() -> None:
    """The optimizer got the last one alone."""
    last = trace_of([summed(step, which=slice(1, None)) for step in range(STEPS)], **LAST)
    assert own_sums.seen_through(last) is last
    assert traces.judge("weighting", [last]).verdict is Verdict.FALSIFIED
