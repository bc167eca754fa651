"""How much each micro-batch would have to count for a gradient to be right."""

from __future__ import annotations

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.causes import shares
from entrenar_py.shared.trace import Update
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import (
    LOCAL,
    STEPS,
    Vectors,
    plus,
    records,
    summed,
    times,
    trace_of,
)

TRACE = trace_of([summed(step) for step in range(STEPS)])
(UPDATE,) = [one for one in TRACE.of(Update) if (one.step, one.rank) == (0, 0)]


def weighted(*factors: float) -> Vectors:
    """Return the sum of the first step's micro-batches, each with a factor."""
    given = [one for of_rank in LOCAL[0] for one in of_rank]
    return plus(*(times(factor, one) for factor, one in zip(factors, given, strict=True)))


def test_shares_are_named() -> None:
    """Each micro-batch is named with its share, relative to the one that it has."""
    told = shares.explain(TRACE, UPDATE, records(weighted(0.25, 0.25, 0.75, 0.75)), 1e-4)
    assert "those of rank 0 in micro-batch 0 0.5 times, rank 0 in micro-batch 1 0.5 times" in told
    assert "rank 1 in micro-batch 0 1.5 times" in told
    assert "a mean of means" not in told, "all have the same weight"


def test_weights_explain_them() -> None:
    """If the right shares are the weights', the means were added without them."""
    trace = TRACE
    for shard, weight in enumerate((2.0, 4.0, 6.0, 8.0)):
        for_shard = {"step": 0, "shard": shard}
        trace = traces.altered(trace, type(trace.events[2]), for_shard, weight=weight)
    told = shares.explain(trace, UPDATE, records(weighted(0.1, 0.2, 0.3, 0.4)), 1e-4)
    assert told.endswith("as their samples or tokens say, which could mean: a mean of means")


@pytest.mark.parametrize("due", [summed(0), times(3.0, summed(0)), summed(1)])
def test_what_shares_do_not_explain(due: Vectors) -> None:
    """Equal shares, one factor, and a gradient of other samples say nothing."""
    assert shares.explain(TRACE, UPDATE, records(due), 1e-4) == ""


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
    """Return what `explain_later` says of step 0 of TRACE, whose gradient ought to be `due`."""
    by_rank, of_step = evidence.updates(TRACE)[0], evidence.shards(TRACE)[0]
    return shares.explain_later(by_rank, of_step, UPDATE, records(due), bound, floor)
