"""Dropout whose mask is data: drawn from a named stream, recorded, the same on every backend."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3


NAMING_NUMBERS = 8  # of 24 random bits each: enough to tell any two streams apart


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks come from `rng` in call order; `digest()` names the stream.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._rate = rate
        self._rng = rng
        self._first: blake3 | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with a fresh mask applied; same shape, differentiable."""
        numbers = self._rng.random(tuple(tensor.shape), dtype=np.float32)
        self._first = self._first or blake3(numbers.reshape(-1)[:NAMING_NUMBERS].data.cast("B"))
        kept = numbers >= self._rate
        return tensor * torch.from_numpy(kept / np.float32(1 - self._rate)).to(tensor.device)

    def digest(self) -> str | None:
        """32 hex digits of the first numbers drawn; None if a model without dropout drew none.

        Of the first ones, so that two shards of different sizes that share a stream are found out;
        of numbers, since masks of a few elements are often alike by chance.
        """
        return None if self._first is None else str(self._first.hexdigest(16))


def none(tensor: torch.Tensor) -> torch.Tensor:
    """No dropout: `tensor` itself."""
    return tensor
