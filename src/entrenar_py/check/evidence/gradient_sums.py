"""Compare a sum of gradients with the averaged gradient. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from entrenar_py.check.evidence import closeness, factors

_TELLING_MIN = 3  # elements: shorter vectors are multiples of each other by chance
Vectors = Mapping[str, np.ndarray[Any, Any]]


def off(sums: Vectors, mean: Vectors, divisor: float, allowed: float) -> set[str]:
    """Return the tensors whose sum is further than `allowed` from `divisor` times their mean."""
    gaps = {
        name: np.square(sums[name] - divisor * value.astype(np.float64)).sum()
        for name, value in mean.items()
    }
    return {name for name, gap in gaps.items() if not math.sqrt(gap) <= allowed}


def divisor(sums: Vectors, mean: Vectors) -> float | None:
    """Return the number that most tensors' sums were divided by, or None if there is none.

    Each tensor's divisor is the projection of its sum on its mean. The result is the median,
    weighted by the squared size of the sums and without small tensors, so that a tensor with
    another divisor does not change it.
    """
    divisors = []
    sizes = {name: float(np.square(value).sum()) for name, value in sums.items()}
    small = sum(sizes.values()) / closeness.NOISE_SHARE**2
    for name, value in mean.items():
        wide = value.astype(np.float64)
        norm = float(np.dot(wide, wide))
        number = float(np.dot(sums[name], wide)) / norm if norm else math.nan
        if sizes[name] >= small and math.isfinite(number):
            divisors.append((number, sizes[name]))
    left = sum(size for _, size in divisors) / 2
    for number, size in sorted(divisors):
        left -= size
        if left <= 0:
            return number
    return None


def divisors(sums: Vectors, mean: Vectors, bound: float) -> list[float]:
    """Return the numbers by which several elements of a tensor's sum were divided exactly.

    The number of most tensors comes first.
    """
    counts: dict[float, int] = {}
    for name, value in mean.items():
        number = factors.ratio(value, sums[name], bound)
        if number is None or number <= 0 or np.count_nonzero(value) < _TELLING_MIN:
            continue
        known = next((one for one in counts if abs(one - number) <= 2 * bound * one), number)
        counts[known] = counts.get(known, 0) + 1
    return sorted(counts, key=counts.__getitem__, reverse=True)


def shapes(tensors: Vectors) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}
