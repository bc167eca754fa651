"""Dropout whose mask is data: drawn from a named stream, recorded, the same on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

NAMING_NUMBERS = 8  # of 24 random bits each: enough to tell any two streams apart


class ShardStreams:
    """Draws for a whole batch what its logical shards would draw, each from a stream of its own.

    `streams` are (stream, number of samples) in the order of the samples. Stands in for a
    `numpy.random.Generator` where Dropout asks for one.
    """

    def __init__(self, streams: Sequence[tuple[np.random.Generator, int]]) -> None:
        self._streams = [(rng, size) for rng, size in streams if size]
        self._num_samples = sum(size for _, size in self._streams)

    def random(self, shape: tuple[int, ...], dtype: type[np.float32]) -> NDArray[Any]:
        """Uniform in [0, 1), of `shape`; its first axis holds equally many rows for each sample."""
        rows = shape[0] // self._num_samples
        parts = [rng.random((size * rows, *shape[1:]), dtype) for rng, size in self._streams]
        return np.concatenate(parts)


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks come from `rng` in call order; `digest()` names the stream.
    """

    def __init__(self, rate: float, rng: np.random.Generator | ShardStreams) -> None:
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
