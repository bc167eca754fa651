"""The weighted mean of vectors, along the fixed tree.

A float32 times a weight below 2**29 is exact in float64, and a sum of such products can't overflow
there. So the mean is rounded to float32 once, and the mean of one vector is that vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.reduction import Node, Vector

ELEMENTS = 2**16  # that are averaged at a time; each takes 8 bytes a vector


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[int]) -> Vector:
    """Return sum(weight * vector) / sum(weights), float32 [num_elements].

    `vectors` are finite, and of one length. They are added in their order along the tree, so the
    result has the same bits whenever the order is the same. Raises ValueError if all weights are 0.
    """
    total = sum(weights)
    if not total:
        raise ValueError("all weights are 0: their mean is not defined")
    mean = np.empty_like(vectors[0])
    for begin in range(0, len(mean), ELEMENTS):
        part = slice(begin, begin + ELEMENTS)
        leaves = (
            _leaf(index, vector[part], weight)
            for index, (vector, weight) in enumerate(zip(vectors, weights, strict=True))
        )
        mean[part] = reduction.root(leaves, len(vectors)).vector / float(total)
    return mean


def _leaf(index: int, vector: Vector, weight: int) -> Node:
    """Return a leaf of the tree, in float64. The tree adds whatever type its leaves have."""
    product = np.multiply(vector, float(weight), dtype=np.float64)
    return Node(0, index, cast("Vector", product), 0.0, float(weight))


def first_not_finite(vector: Vector) -> int | None:
    """Return the index of the first NaN or Inf in `vector`, or None."""
    for begin in range(0, len(vector), ELEMENTS):
        finite = np.isfinite(vector[begin : begin + ELEMENTS])
        if not finite.all():
            return begin + int(finite.argmin())
    return None
