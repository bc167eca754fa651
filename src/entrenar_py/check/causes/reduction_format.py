"""Recognise gradients that ranks rounded to 16 bits before they added them. Judges nothing.

A script may do that by hand, where no hook shows it. Every element of the sum is then off by no
more than a few roundings of its terms. A sum that is wrong by a factor, or in some rows, may be
off by as little; but roundings are off at random, and hardly any element of a tensor is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import precision, step_sums
from entrenar_py.check.evidence.factors import Vector
from entrenar_py.check.evidence.step_sums import Vectors
from entrenar_py.shared.trace import Shard, Trace, Update

_STEPS = 4  # to look at
_TELLING_MIN = 16  # elements whose errors tell a rounding from something else, hardly by chance
_EXACT = 2.0**-18  # an element that is off by a smaller share of its terms was not rounded
_EXACT_MOST = 0.5  # the largest share of such elements in a tensor that was rounded
_ONE_FACTOR = 0.8  # the share of the squared errors that one factor would explain, and chance not
# The smallest number of a format, below which rounding is absolute; bfloat16 has float32's.
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126}


def undeclared(trace: Trace, bound: float) -> str:
    """Return the format, `float16` or `bfloat16`, to which a run's sums were rounded unseen.

    "" if none was, if none can be told, or if local gradients have that format themselves. `bound`
    is the relative L2 distance up to which a sum in float32 is not rounded any further.
    """
    if precision.unit(trace) > precision.FLOAT32:
        return ""
    shards = evidence.shards(trace)
    found = ""
    for step, by_rank in sorted(evidence.updates(trace).items())[:_STEPS]:
        rounded = of_step(shards.get(step, []), by_rank, bound)
        if rounded is None:
            return ""
        found = max(found, rounded, key=_coarseness)
    return found


def _coarseness(name: str) -> float:
    return precision.SIXTEEN[name][0] if name else 0.0


def of_step(shards: list[Shard], by_rank: Mapping[int, Update], bound: float) -> str | None:
    """Return the format of a step's sums, "" if they were not rounded; None if it is neither.

    Sums that are off by less than `bound`, all tensors together, were not rounded.
    """
    update = evidence.any_rank(by_rank)
    known = {
        rank: step_sums.total(
            by_rank, [shard for shard in shards if shard.rank == rank], evidence.elements
        )
        for rank in sorted({shard.rank for shard in shards})
    }
    local = {rank: sums for rank, sums in known.items() if sums}
    applied = evidence.elements(update.gradient)
    if not local or applied is None or any(_names(s) != _names(applied) for s in local.values()):
        return ""
    whole = {name: np.sum([sums[name] for sums in local.values()], axis=0) for name in applied}
    divisor = _divisor(whole, applied)
    if divisor is None:
        return ""
    off = {
        name: divisor * value.astype(np.float64) - whole[name] for name, value in applied.items()
    }
    if _size(off) <= bound * _size(whole):
        return ""
    fits = (name for name in ("float16", "bfloat16") if _fits(name, off, local))
    return next(fits, None)


def _divisor(whole: Vectors, applied: Vectors) -> float | None:
    """Return the number that most elements of a sum were divided by, None if there is none."""
    sums = np.concatenate([whole[name] for name in applied])
    means = np.concatenate([value.astype(np.float64) for value in applied.values()])
    with np.errstate(invalid="ignore"):  # of gradients that are not finite there is none
        ratios = sums[means != 0] / means[means != 0]
    number = float(np.median(ratios)) if ratios.size else 0.0
    return number if number and math.isfinite(number) else None


def _fits(name: str, off: Vectors, local: Mapping[int, Vectors]) -> bool:
    """Return whether `off` is what rounding each rank's term, each sum and the divisor explains."""
    roundings = (2 * len(local) + 1) * precision.SIXTEEN[name][0]
    floor = len(local) * _SMALLEST[name]
    terms = {n: np.sum([np.abs(sums[n]) for sums in local.values()], axis=0) for n in off}
    if not all((np.abs(gap) <= roundings * terms[n] + floor).all() for n, gap in off.items()):
        return False
    whole = {n: np.sum([sums[n] for sums in local.values()], axis=0) for n in off}
    large = [(n,) for n, gap in off.items() if gap.size >= _TELLING_MIN]
    small = tuple(n for n, gap in off.items() if gap.size < _TELLING_MIN)
    return all(
        _is_random(*(np.concatenate([held[n] for n in names]) for held in (off, whole, terms)))
        for names in (*large, small)
        if names
    )


def _is_random(gap: Vector, whole: Vector, terms: Vector) -> bool:
    """Return whether errors are scattered over elements as those of roundings are.

    True if none was rounded, or if there are too few to tell.
    """
    there = terms > 0
    gap, whole, terms = gap[there], whole[there], terms[there]
    exact = np.abs(gap) <= _EXACT * terms
    if gap.size < _TELLING_MIN or exact.all():
        return True
    along = float(gap @ whole) ** 2
    if along > _ONE_FACTOR * float(gap @ gap) * float(whole @ whole):
        return False
    return bool(exact.mean() <= _EXACT_MOST)


def _names(vectors: Vectors) -> dict[str, tuple[int, ...]]:
    return step_sums.shapes(vectors)


def _size(vectors: Vectors) -> float:
    return math.sqrt(sum(float(np.square(value).sum()) for value in vectors.values()))
