"""Micro-batches that a script adds up in a buffer of its own count as applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.causes import own_sums
from entrenar_py.shared.trace import Shard
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import SHAPES, STEPS, summed, times, trace_of

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


def test_gradients_that_are_asked_for_are_no_micro_batches() -> None:
    """`torch.autograd.grad` in an inner loop adds to nothing; its samples are the micro-batch's."""
    last = trace_of([summed(step, which=slice(1, None)) for step in range(STEPS)], **LAST)
    events = [
        replace(event, loss_sum=1.0 if event.shard % 2 else None)
        if isinstance(event, Shard)
        else event
        for event in last.events
    ]
    seen = own_sums.seen_through(replace(last, events=tuple(events)))
    assert {shard.shard for shard in seen.of(Shard) if shard.step} == {1, 3}
    drawn = {shard.step: {*shard.ids} for shard in last.of(Shard) if shard.rank == 0}
    kept = {shard.step: {*shard.ids} for shard in seen.of(Shard) if shard.rank == 0}
    assert all(drawn[step] <= kept[step] for step in drawn)
    weights = {(s.step, s.weight, s.loss_sum) for s in seen.of(Shard) if s.step}
    assert weights == {(step, 2.0, 2.0) for step in range(1, STEPS)}
