"""Find losses that each rank divides by the number of its own elements: tokens, boxes, pixels.

Their mean over the ranks is a mean of means. With one loss, the gradient of one worker shows it: it
is a combination of the ranks'. With a second loss, which is divided rightly, no combination is, as
if samples acted on each other. But the terms of both runs (`Shard.terms`) show it: a term counts as
much on each rank and on one worker, and has as many elements on that as on all ranks together.

Elements that samples have only together (pairs, what is mined in a batch) don't add up so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from entrenar_py.check import evidence
from entrenar_py.check.causes.run_comparison import GRADIENT_BOUND
from entrenar_py.check.evidence import step_sums
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

_BOUND = 1e-3  # relative: numbers are a float32's; counts that differ do so by more
_PLACES_MIN = 2  # micro-batches: one alone may have such numbers by chance


class _Term(NamedTuple):
    """Losses that count alike: the number of their elements, and how much all of them count."""

    size: float
    whole: float


class _Place(NamedTuple):
    """A micro-batch of a step on each rank, and the counts of a term that each has for itself."""

    shards: Sequence[Shard]
    counts: Sequence[float]
    is_own: bool


def judge(tally: Tally, trace: Trace, model: Trace) -> None:
    """Count as missing what ranks mean that divide by numbers of their own.

    DETR adds up the boxes of all ranks, and YOLO takes each rank's mean: both are on purpose.
    `model` is the run on one worker.
    """
    runs = (trace, model)
    declared = any(run.traits.losses != "backward" or run.traits.loss_over for run in runs)
    if declared or trace.scenario.workload != "own" or trace.scenario.world_size == 1:
        return
    places = [*_places(trace, model)]
    if len(places) < _PLACES_MIN or not all(place.is_own for place in places):
        tally.compared += len(places)
        return
    first = places[0]
    shown = listed([f"{count:g} on rank {shard.rank}" for shard, count in _of(first)], most=4)
    tally.miss(
        f"each rank divides one of its losses by the number of its own elements, {shown}, and one "
        f"worker by that of all (step {first.shards[0].step}): right if each rank's mean is meant, "
        'observe(..., loss_over="micro-batch"), wrong if each element is to count alike: add the '
        "number up over ranks, by an all-reduce"
    )


def _of(place: _Place) -> Iterator[tuple[Shard, float]]:
    return zip(place.shards, place.counts, strict=True)


def _places(trace: Trace, model: Trace) -> Iterator[_Place]:
    """Yield places where ranks have unlike numbers of elements, and one worker has their sum."""
    alone, shards = evidence.shards(model), evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if not _is_plain_sum(by_rank, shards.get(step, ())):
            continue
        of_ranks = [[s for s in shards[step] if s.rank == rank] for rank in sorted(by_rank)]
        for whole, *parts in zip(alone.get(step, ()), *of_ranks, strict=False):
            if (place := _place(whole, parts)) is not None:
                yield place


def _place(whole: Shard, parts: Sequence[Shard]) -> _Place | None:
    """Return a micro-batch whose parts have other numbers of elements, if samples are the same."""
    ids = Counter(id_ for part in parts for id_ in part.ids)
    if not ids or ids != Counter(whole.ids):
        return None
    known = [_terms(shard) for shard in (whole, *parts)]
    if len({*map(len, known)}) != 1:
        return None
    for due, *terms in zip(*known, strict=True):
        counts = [term.size for term in terms]
        if not _alike(min(counts), max(counts)) and _alike(sum(counts), due.size):
            is_own = all(_alike(term.whole, due.whole) for term in terms)
            return _Place(parts, counts, is_own)
    return None


def _terms(shard: Shard) -> list[_Term]:
    """Return a micro-batch's terms, in order, those with one share as one; unknown ones left out.

    A loss may be added sample by sample.
    """
    counts: dict[float, float] = {}
    for count, share, *_ in shard.terms:
        if count and share and math.isfinite(share):
            counts[share] = counts.get(share, 0.0) + count
    return [_Term(count, abs(share) * count) for share, count in counts.items()]


def _is_plain_sum(by_rank: Mapping[int, Update], shards: Sequence[Shard]) -> bool:
    """Return whether the ranks' gradients are added as they are, as far as is known.

    A script may weight them by numbers of elements then.
    """
    total = step_sums.total(by_rank, shards)
    applied = evidence.vectors(evidence.any_rank(by_rank).gradient)
    if total is None or applied is None or total.keys() != applied.keys():
        return bool(shards) and not any(shard.gradient for shard in shards)
    if (divisor := step_sums.divisor(total, applied)) is None:
        return False
    size = math.hypot(
        *(float((vector.astype(float) ** 2).sum()) ** 0.5 for vector in applied.values())
    )
    allowed = GRADIENT_BOUND * abs(divisor) * size
    return not step_sums.off(total, applied, divisor, allowed)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _BOUND * abs(other)
