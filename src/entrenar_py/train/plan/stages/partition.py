"""Cuts a row of blocks into stages so that the slowest stage is as fast as can be, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


def best(costs: Sequence[Costs]) -> tuple[range, ...] | None:
    """Return the blocks of each stage, of which the largest cost is least; None if there are none.

    `costs` has for each stage float64 [num_blocks + 1, num_blocks + 1]: at [a, b] the cost of
    blocks a to b - 1, infinite for what can't be. Each stage gets a block at least. Of the cuts
    with the least largest cost, one with the least sum of costs is returned, which makes the
    shortest step: a step takes the sum once, and the largest cost for each further shard.
    """
    largest = _ends(costs, np.maximum)
    if largest is None:
        return None
    limit = slowest(costs, largest)
    return _ends([np.where(one <= limit, one, np.inf) for one in costs], np.add)


def slowest(costs: Sequence[Costs], stages: Sequence[range]) -> float:
    """Return the largest cost of `stages`."""
    return max(float(one[own.start, own.stop]) for one, own in zip(costs, stages, strict=True))


def total(costs: Sequence[Costs], stages: Sequence[range]) -> float:
    """Return the sum of the costs of `stages`."""
    return sum(float(one[own.start, own.stop]) for one, own in zip(costs, stages, strict=True))


def _ends(costs: Sequence[Costs], join: np.ufunc) -> tuple[range, ...] | None:
    """Return the stages whose costs, joined by `join`, are least; None if no cut is finite.

    Dynamic programming over prefixes: the best cut of the first b blocks into k stages has, up to
    its last stage, a best cut of some a < b blocks into k - 1. `join` is monotone, so that holds
    for the maximum and for the sum.
    """
    size = len(costs[0])
    least = np.full(size, np.inf)  # by the number of blocks so far
    least[0] = 0.0
    begins: list[NDArray[np.intp]] = []
    empty = np.tril(np.ones((size, size), dtype=bool))  # stages without a block
    for one in costs:
        joined = join(least[:, None], np.where(empty, np.inf, one))
        begins.append(joined.argmin(axis=0))
        least = joined.min(axis=0)
    if not np.isfinite(least[-1]):
        return None
    ends = [size - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return tuple(range(a, b) for a, b in pairwise(reversed(ends)))
