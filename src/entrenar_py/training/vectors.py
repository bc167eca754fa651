"""The workload `vectors`: every sample's gradient is a vector that is known beforehand.

The loss is linear in the one tensor, so that what a trainer averages does not depend on what it
has learned: this is how a reduction is judged by itself, at any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor, from_numpy

from entrenar_py.training import datasets
from entrenar_py.training.tensors import (
    Array,
    DropFunction,
    LinearFunction,
    TensorSpec,
    uniform,
)

WEIGHTS = 3  # samples weigh 1, 2 or 3 in turn


class GivenVectors:
    """The loss of sample i is the inner product of `vector` and its own v_i, normally distributed.

    No v_i is kept: each is drawn again from its own seed wherever it is needed, as a whole or piece
    by piece from the start.
    """

    name = "vectors"
    weight_max = WEIGHTS

    def __init__(self, num_samples: int, *, length: int, data: np.random.Generator) -> None:
        self.num_samples = num_samples
        self.specs = (TensorSpec("vector", (length,), "trainable", decayed=True),)
        self._length = length
        self._seeds = data.integers(2**63, size=num_samples)
        self.data_digest = datasets.digest(self._seeds, np.array([length]))

    def initial(self, rng: np.random.Generator) -> dict[str, Array]:
        return {spec.name: uniform(rng, spec, bound=0.5) for spec in self.specs}

    def weight(self, ids: Sequence[int]) -> int:
        return sum(1 + sample % WEIGHTS for sample in ids)

    def stream(self, sample: int) -> np.random.Generator:
        """Draws the elements of v_`sample`, one after the other, as float32 standard normals."""
        return np.random.Generator(np.random.PCG64(int(self._seeds[sample])))

    def batch(self, ids: Sequence[int]) -> tuple[Tensor]:
        """The sum of the v_i, added in their order, float32 [length]."""
        return (from_numpy(self._total(ids)),)

    def loss_of(
        self,
        tensors: Mapping[str, Tensor],
        batch: Sequence[Tensor],
        *,
        linear: LinearFunction,
        drop: DropFunction,
    ) -> Tensor:
        held = tensors["vector"]
        return (held * batch[0].to(held)).sum()

    def gradients(
        self,
        tensors: Mapping[str, Tensor],
        ids: Sequence[int],
        *,
        drop: DropFunction,
        scale: float,
    ) -> tuple[float, list[Array]]:
        total = self._total(ids)
        loss = (tensors["vector"].detach() * from_numpy(total)).sum().item()
        total *= np.float32(scale)
        return loss, [total]

    def statistics(self, ids: Sequence[int]) -> dict[str, Array]:
        return {}

    def _total(self, ids: Sequence[int]) -> Array:
        """The sum of the v_i, added in their order."""
        drawn = (self.stream(i).standard_normal(self._length, dtype=np.float32) for i in ids)
        total = next(drawn)
        for vector in drawn:
            total += vector
        return total
