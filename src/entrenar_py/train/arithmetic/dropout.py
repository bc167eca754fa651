"""Dropout: masks come from a given random stream, so they are the same on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

NAMING_NUMBERS = 8  # of 24 random bits each: enough to tell any two streams apart


class ShardStreams:
    """Draws the random numbers of a whole batch, each logical shard's from the shard's own stream.

    `streams` holds a (stream, number of samples) pair for each shard, in the order of the samples.
    Replaces the `numpy.random.Generator` that Dropout takes.
    """

    def __init__(self, streams: Sequence[tuple[np.random.Generator, int]]) -> None:
        self._streams = [(rng, size) for rng, size in streams if size]
        self._num_samples = sum(size for _, size in self._streams)

    def random(self, shape: tuple[int, ...], dtype: type[np.float32]) -> NDArray[Any]:
        """Return numbers in [0, 1) of `shape`; each sample has equally many rows (first axis)."""
        rows = shape[0] // self._num_samples
        parts = [rng.random((size * rows, *shape[1:]), dtype) for rng, size in self._streams]
        return np.concatenate(parts)


class Dropout:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Masks are drawn from `rng` in call order. `digest()` identifies the stream.
    """

    def __init__(self, rate: float, rng: np.random.Generator | ShardStreams) -> None:
        self._rate = rate
        self._rng = rng
        self._first: blake3 | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` with a fresh mask applied: same shape, differentiable."""
        numbers = self._rng.random(tuple(tensor.shape), dtype=np.float32)
        self._first = self._first or blake3(numbers.reshape(-1)[:NAMING_NUMBERS].data.cast("B"))
        kept = numbers >= self._rate
        return tensor * torch.from_numpy(kept / np.float32(1 - self._rate)).to(tensor.device)

    def seed(self) -> int:
        """Draw a seed for a generator that isn't a stream's own, from 0 to 2^63 - 1."""
        numbers = self._rng.random((3,), dtype=np.float32)  # of 24 random bits each
        self._first = self._first or blake3(numbers.data.cast("B"))
        return int.from_bytes(blake3(numbers.data.cast("B")).digest(8), "little") >> 1

    def key(self) -> torch.Tensor:
        """Draw a key for `backends.draws`, int32 [2]."""
        seed = self.seed()
        return torch.from_numpy(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32))

    def digest(self) -> str | None:
        """Return 32 hex digits of the first numbers drawn, or None if nothing was drawn.

        Only the first numbers count, so shards of different sizes that share a stream by mistake
        have the same digest. Numbers are digested instead of masks, since short masks are often
        equal by chance.
        """
        return None if self._first is None else str(self._first.hexdigest(16))


def none(tensor: torch.Tensor) -> torch.Tensor:
    """Apply no dropout: return `tensor` itself."""
    return tensor
