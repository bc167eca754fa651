"""Dropout whose mask is data: drawn from a named stream, recorded, the same on every backend."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks come from `rng` in call order; `digest()` names everything drawn so far.
    """

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self._rate = rate
        self._rng = rng
        self._drawn = blake3()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with a fresh mask applied; same shape, differentiable."""
        kept = self._rng.random(tuple(tensor.shape), dtype=np.float32) >= self._rate
        self._drawn.update(kept.data.cast("B"))
        return tensor * torch.from_numpy(kept / np.float32(1 - self._rate)).to(tensor.device)

    def digest(self) -> str:
        """32 hex digits of all masks so far, in order."""
        return str(self._drawn.hexdigest(16))


def none(tensor: torch.Tensor) -> torch.Tensor:
    """No dropout: `tensor` itself."""
    return tensor
