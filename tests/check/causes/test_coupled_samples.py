"""Losses that ranks divide by the number of their own elements, beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from entrenar_py.check.causes import coupled_samples
from entrenar_py.shared.trace import Shard, Trace
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.check.clauses.micro_batch_traces import STEPS, plus, summed, times, trace_of

Terms = tuple[tuple[float, ...], ...]
BOXES = ((9.0, 4.0), (16.0, 8.0))  # of each rank's micro-batches
CLASSES = (2.0, 0.25, 2.0, 2.0)  # of two rows, divided by two micro-batches
ALL_CLASSES = (4.0, 0.125, 2.0, 4.0)


def boxes(count: float, divisor: float) -> tuple[float, ...]:
    """Return four distances a box, divided by `divisor` and by two micro-batches."""
    return 4 * count, 5 / divisor / 2, 2.0, divisor


def alone_of(trace: Trace, terms: Sequence[Terms]) -> Trace:
    """Return the run of one worker that has both ranks' micro-batches as one, with `terms`."""
    events = []
    for event in trace.events:
        if getattr(event, "rank", 0):
            continue
        if isinstance(event, Shard):
            other = traces.one(trace, Shard, step=event.step, shard=event.shard + 2)
            event = replace(event, ids=event.ids + other.ids, terms=terms[event.shard], gradient={})
        events.append(event)
    return replace(trace, scenario=trace.scenario.with_(world_size=1), events=tuple(events))


def judged(
    of_ranks: Sequence[Sequence[Terms]], alone: Sequence[Terms], *, share: float = 1.0
) -> Tally:
    """Return the tally on two ranks with these terms; rank 1's gradient is added `share` times."""
    applied = [
        plus(summed(step, ranks=[0]), times(share, summed(step, ranks=[1])))
        for step in range(STEPS)
    ]
    trace = traces.was(trace_of(applied, terms=of_ranks), losses="backward")
    tally = Tally("")
    coupled_samples.judge_rank_means(tally, trace, alone_of(trace, alone))
    return tally


OWN = [[(CLASSES, boxes(count, count)) for count in counts] for counts in BOXES]
ALONE = [(ALL_CLASSES, boxes(sum(counts), sum(counts))) for counts in zip(*BOXES, strict=True)]


def test_a_number_of_a_ranks_own_may_be_meant() -> None:
    """A loss beside it that is divided rightly doesn't hide it."""
    tally = judged(OWN, ALONE)
    assert tally.broken is None
    assert (
        "36 on rank 0, 64 on rank 1, and one worker divides it by the number of all"
        in tally.missing[0]
    )


def test_a_number_of_all_ranks_is_right() -> None:
    """It is the mean of the ranks' numbers, as their gradients are averaged."""
    means = [sum(counts) / 2 for counts in zip(*BOXES, strict=True)]
    of_all = [
        [(CLASSES, boxes(n, mean)) for n, mean in zip(counts, means, strict=True)]
        for counts in BOXES
    ]
    tally = judged(of_all, ALONE)
    assert (tally.missing, tally.compared) == ([], 2 * STEPS)


@pytest.mark.parametrize("pairs", [22.0, 30.0])
def test_what_is_counted_in_a_whole_batch_has_no_number_to_add(pairs: float) -> None:
    """Pairs that are mined in a batch are others on one worker, and not as many."""
    alone = [(ALL_CLASSES, boxes(pairs, pairs)), (ALL_CLASSES, boxes(pairs, pairs))]
    assert judged(OWN, alone).missing == []


def test_gradients_that_are_added_by_those_numbers_are_left_to_others() -> None:
    """A script may weight each rank's gradient in place of its loss."""
    assert judged(OWN, ALONE, share=16 / 9).missing == []


def test_equal_numbers_show_nothing() -> None:
    """Ranks with as many elements divide by a number that each of both may be."""
    alike = [[(CLASSES, boxes(4, 4))] * 2] * 2
    assert judged(alike, [(ALL_CLASSES, boxes(8, 8))] * 2).compared == 0
