"""Dropout whose mask is data: drawn from a named stream, recorded, the same on every backend."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks come from `rng` in call order; `digest()` names every number drawn so far.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._rate = rate
        self._rng = rng
        self._drawn = blake3()
        self._num_drawn = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with a fresh mask applied; same shape, differentiable."""
        numbers = self._rng.random(tuple(tensor.shape), dtype=np.float32)
        self._drawn.update(numbers.data.cast("B"))
        self._num_drawn += numbers.size
        kept = numbers >= self._rate
        return tensor * torch.from_numpy(kept / np.float32(1 - self._rate)).to(tensor.device)

    def digest(self) -> str | None:
        """32 hex digits of all numbers so far, in order; None if a model without dropout drew none.

        Of the numbers, not of the masks: two masks of a few elements are often alike by chance.
        """
        return str(self._drawn.hexdigest(16)) if self._num_drawn else None


def none(tensor: torch.Tensor) -> torch.Tensor:
    """No dropout: `tensor` itself."""
    return tensor
