"""The workload `vectors`: every sample's gradient is a vector that is known beforehand.

The loss is linear in the only tensor, so the average gradient does not depend on the weights. This
tests a reduction by itself, at any length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, from_numpy

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import datasets
from entrenar_py.train.arithmetic.tensors import (
    Array,
    Batch,
    DropFunction,
    LinearFunction,
    Tensors,
    TensorSpec,
    Workload,
)

WEIGHTS = 3  # samples weigh 1, 2 or 3 in turn
DRAWN = "drawn"  # as `terms`: vectors are drawn, and every sample weighs 1
TERMS_MAX = 1024


class GivenVectors(Workload):
    """The loss of sample i is the inner product of the tensor `vector` and a known vector v_i.

    Vectors as `terms` are the v_i, repeated cyclically. With DRAWN or None, v_i is normally
    distributed and not stored: its own seed draws it again when needed, whole or in pieces. Samples
    weigh 1 each; with None they weigh 1, 2 or 3 in turn.
    """

    name = "vectors"
    weight_max = WEIGHTS

    def __init__(
        self, num_samples: int, *, length: int, data: np.random.Generator, terms: Any = None
    ) -> None:
        """Raises UsageError if `terms` is neither None, nor DRAWN, nor vectors of `length`."""
        self.num_samples = num_samples
        self._equal = terms is not None
        self._given = None if terms in (None, DRAWN) else _vectors(terms, length)
        self.specs = (TensorSpec("vector", (length,), "trainable", decayed=True),)
        self._length = length
        self._seeds = data.integers(2**63, size=num_samples)
        arrays = [self._seeds, np.array([length])]
        if terms is not None:
            arrays.append(np.array([1.0]) if self._given is None else self._given)
        self.data_digest = datasets.digest(*arrays)

    def weight(self, ids: Sequence[int]) -> int:
        return len(ids) if self._equal else sum(1 + sample % WEIGHTS for sample in ids)

    def pieces(self, sample: int) -> Callable[[int], Array]:
        """Return a function: count -> the next `count` elements of v_`sample`, float32."""
        if self._given is not None:
            return _pieces(self._given[sample % len(self._given)])
        stream = np.random.Generator(np.random.PCG64(int(self._seeds[sample])))
        return lambda count: stream.standard_normal(count, dtype=np.float32)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor]:
        """Return the sum of the v_i, added in the order of `ids`, float32 [length]."""
        return (from_numpy(self._total(ids)),)

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        vector = tensors["vector"]
        return (vector * batch[0].to(vector)).sum()

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        total = self._total(ids)
        loss = (tensors["vector"].detach() * from_numpy(total)).sum().item()
        total *= np.float32(scale)
        return loss, [total]

    def _total(self, ids: Sequence[int]) -> Array:
        """Return the sum of the v_i, added in the order of `ids`."""
        drawn = (self.pieces(i)(self._length) for i in ids)
        total = next(drawn)
        for vector in drawn:
            total += vector
        return total


def _pieces(vector: Array) -> Callable[[int], Array]:
    place = 0

    def piece(count: int) -> Array:
        nonlocal place
        start, place = place, place + count
        return vector[start:place].copy()

    return piece


def _vectors(terms: Any, length: int) -> Array:
    """Return `terms` as float32 [count, length]; UsageError if they can't be read as that."""
    rows = terms if isinstance(terms, list) else []
    if not 0 < len(rows) <= TERMS_MAX or not all(_is_vector(row, length) for row in rows):
        shown = repr(terms)
        raise UsageError(
            f"options terms={shown[:80]}: use {DRAWN}, or a list of 1 to {TERMS_MAX} lists of "
            f"width={length} finite numbers each"
        )
    with np.errstate(over="ignore"):
        vectors = np.array(rows, dtype=np.float32)
    if not np.isfinite(vectors).all():
        raise UsageError("options terms: a number is too large for float32; use smaller ones")
    return vectors


def _is_vector(row: Any, length: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == length
        and all(type(x) in (int, float) and math.isfinite(x) for x in row)
    )
