"""Recognise gradients that ranks rounded to 16 bits before they added them. Judges nothing.

A script may do that by hand, where no hook shows it. Every element of the sum is then off by no
more than a few roundings of its terms, which a sum that is wrong otherwise hardly is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from entrenar_py.checks import evidence, gradient_sums, precision, step_sums
from entrenar_py.checks.gradient_sums import Vectors
from entrenar_py.trace import Shard, Trace, Update

_STEPS = 4  # to look at
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
        rounded = _of_step(shards.get(step, []), by_rank, bound)
        if rounded is None:
            return ""
        found = max(found, rounded, key=_coarseness)
    return found


def _coarseness(name: str) -> float:
    return precision.SIXTEEN[name][0] if name else 0.0


def _of_step(shards: list[Shard], by_rank: Mapping[int, Update], bound: float) -> str | None:
    """Return the format of a step's sums, "" if they were not rounded; None if it is neither."""
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
    divisor = gradient_sums.divisor(whole, applied)
    if not divisor or not math.isfinite(divisor):
        return ""
    off = {
        name: np.abs(divisor * value.astype(np.float64) - whole[name])
        for name, value in applied.items()
    }
    if _size(off) <= bound * _size(whole):
        return ""
    fits = (name for name in ("float16", "bfloat16") if _fits(name, off, local))
    return next(fits, None)


def _fits(name: str, off: Vectors, local: Mapping[int, Vectors]) -> bool:
    """Return whether each rank's term, each sum, and the divisor may have caused what is `off`."""
    roundings = (2 * len(local) + 1) * precision.SIXTEEN[name][0]
    floor = len(local) * _SMALLEST[name]
    return all(
        bool(
            (gap <= roundings * sum(np.abs(sums[tensor]) for sums in local.values()) + floor).all()
        )
        for tensor, gap in off.items()
    )


def _names(vectors: Vectors) -> dict[str, tuple[int, ...]]:
    return gradient_sums.shapes(vectors)


def _size(vectors: Vectors) -> float:
    return math.sqrt(sum(float(np.square(value).sum()) for value in vectors.values()))
