"""NF4 with double quantisation in NumPy, written from its definition: an oracle for bitsandbytes.

A weight is one of 16 levels times the scale of its block of 64. The scales, less their mean, are
one of 256 levels each, times the second scale of their block of 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK, SECOND_BLOCK = 64, 256
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Quantiles of the normal distribution: appendix E of "QLoRA" (Dettmers et al., 2023).
LEVELS: Floats = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def second_levels() -> Floats:
    """Return the 256 levels of a scale: a sign, a power of ten, and a linear fraction.

    Source: "8-bit Approximations for Parallelism in Deep Learning" (Dettmers, 2016), section 2.
    """
    positive: list[float] = []
    for power in range(7):
        edges = np.linspace(0.1, 1, 2**power + 1, dtype=np.float32)
        positive += (np.float32(10.0 ** (power - 6)) * (edges[:-1] + edges[1:]) / 2).tolist()
    return np.sort(np.array([0.0, 1.0, *positive, *(-one for one in positive)], np.float32))


@dataclass(frozen=True)
class Quantised:
    """A matrix: two codes a byte, the first in the high half, and the scales of its blocks.

    `codes` is uint8 [ceil(n / 2)], `scales` uint8 [blocks], `second_scales` float32.
    """

    shape: tuple[int, ...]
    codes: Bytes
    scales: Bytes
    second_scales: Floats
    mean: np.float32


def quantise(weight: Floats, mean: np.float32) -> Quantised:
    """Return `weight` in NF4. `mean` is that of the scales, whose last bit is the summation's."""
    blocks = _blocks(weight, BLOCK)
    scales = np.abs(blocks).max(1)
    ratios = blocks * (np.float32(1) / np.maximum(scales, np.float32(1e-38)))[:, None]
    middles = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)
    codes = np.searchsorted(middles, ratios.reshape(-1)[: weight.size]).astype(np.uint8)
    codes = np.append(codes, np.zeros(weight.size % 2, np.uint8))
    second_codes, second_scales = _second(scales - mean)
    return Quantised(weight.shape, codes[::2] << 4 | codes[1::2], second_codes, second_scales, mean)


def decode(given: Quantised, second: Floats) -> Floats:
    """Return the matrix that the codes stand for, float32. `second` are the levels of scales."""
    levels = LEVELS[np.stack([given.codes >> 4, given.codes & 15], -1).reshape(-1)]
    scales = second[given.scales]
    scales = scales * np.repeat(given.second_scales, SECOND_BLOCK)[: len(scales)] + given.mean
    size = int(np.prod(given.shape))
    return (levels[:size] * np.repeat(scales, BLOCK)[:size]).reshape(given.shape)


def _second(scales: Floats) -> tuple[Bytes, Floats]:
    blocks = _blocks(scales, SECOND_BLOCK)
    largest = np.abs(blocks).max(1)
    ratios = (blocks / np.where(largest == 0, np.float32(1), largest)[:, None]).reshape(-1)
    levels = second_levels()
    nearest = np.abs(ratios[: scales.size, None] - levels).argmin(1)
    return nearest.astype(np.uint8), largest


def _blocks(values: Floats, size: int) -> Floats:
    """Return `values` in rows of `size`, filled up with zeros."""
    return np.pad(values.reshape(-1), (0, -values.size % size)).reshape(-1, size)
