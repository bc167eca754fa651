"""Random numbers that depend only on a key and a position, with the same bits on every device.

Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
There is no state between draws: an element's bits are a function of the key, the number of the draw
and the element's index. The arithmetic is on 32-bit integers, without rounding, so CPU, CUDA and
WGSL agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# rotations of the rounds: two groups of four, alternating
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
NUM_INJECTIONS = 5  # how often a word of the key is added: after every four rounds
PARITY = 0x1BD11BDA
USED_BITS = 24  # bits used of an element's 32, as many as in a float32 significand
_BLOCK = 2**14  # pairs of elements at a time, which stay in a core's cache
_MASK = 0xFFFFFFFF

Words = NDArray[np.uint32]

# kept(key int32 [2], draw, shape, share) -> bool `shape`: for each element, whether it is kept if
# the fraction `share` is dropped. It is an operation of the graph, so each backend draws on its own
# device.
_LIBRARY: Any = torch.library.Library("entrenar", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("kept(Tensor key, int draw, int[] shape, float share) -> Tensor")


class Keyed:
    """A `drop` that drops nothing, but has a key from which a workload draws its own numbers."""

    def __init__(self, key: Tensor) -> None:
        self._key = key

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def key(self) -> Tensor:
        """Return the key, int32 [2]."""
        return self._key


def key_of(drop: Any) -> Tensor | None:
    """Return the key that `drop` has or draws, int32 [2]; None if `drop` drops nothing."""
    found: Tensor | None = drop.key() if hasattr(drop, "key") else None
    return found


def threshold(share: float) -> int:
    """Return the integer below which the `USED_BITS` bits of an element mean that it is dropped."""
    return round(share * (1 << USED_BITS))


def kept(key: Tensor, draw: int, shape: Sequence[int], share: float) -> Tensor:
    """Return a bool tensor of `shape`, True for kept elements; the fraction `share` is dropped.

    `key` is int32 [2], on the result's device. `draw` is the number of the draw for this key.
    """
    result: Tensor = torch.ops.entrenar.kept(key, draw, list(shape), share)
    return result


def _on_cpu(key: Tensor, draw: int, shape: Sequence[int], share: float) -> Tensor:
    first, second = (int(word) & _MASK for word in key.tolist())
    bits = words((first, second), draw, prod(shape))
    bits >>= np.uint32(32 - USED_BITS)
    return torch.from_numpy(bits >= np.uint32(threshold(share))).reshape(list(shape))


def words(key: tuple[int, int], draw: int, count: int) -> Words:
    """Return the random words of the elements 0 to `count` - 1: uint32 [count]."""
    result = np.empty((-(-count // 2), 2), np.uint32)
    for start in range(0, len(result), _BLOCK):
        part = result[start : start + _BLOCK]
        pairs = np.arange(start, start + len(part), dtype=np.uint32)
        part[:, 0], part[:, 1] = threefry(key, pairs, np.full(len(part), draw, np.uint32))
    return result.reshape(-1)[:count]


def threefry(key: tuple[int, int], first: Words, second: Words) -> tuple[Words, Words]:
    """Return both random words of each counter (first, second), and overwrite the arguments."""
    parts = [np.uint32(one) for one in (*key, key[0] ^ key[1] ^ PARITY)]
    first += parts[0]
    second += parts[1]
    high = np.empty_like(second)
    for number in range(1, NUM_INJECTIONS + 1):
        for distance in ROTATIONS[(number - 1) % 2]:
            first += second
            np.right_shift(second, np.uint32(32 - distance), out=high)
            second <<= np.uint32(distance)
            second |= high
            second ^= first
        first += parts[number % 3]
        second += parts[(number + 1) % 3]
        second += np.uint32(number)
    return first, second


def by_torch(key: Tensor, draw: int, shape: Sequence[int], share: float) -> Tensor:
    """Return the result of `kept`, by torch operations in int64 on the key's device."""
    count = prod(shape)
    pairs = torch.arange(-(-count // 2), device=key.device)
    first, second = (part & _MASK for part in key.long().unbind(0))
    parts = [first, second, first ^ second ^ PARITY]
    x0, x1 = (pairs + parts[0]) & _MASK, (parts[1] + draw) & _MASK
    for number in range(1, NUM_INJECTIONS + 1):
        for distance in ROTATIONS[(number - 1) % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = (((x1 << distance) & _MASK) | (x1 >> (32 - distance))) ^ x0
        x0 = (x0 + parts[number % 3]) & _MASK
        x1 = (x1 + parts[(number + 1) % 3] + number) & _MASK
    bits = torch.stack([x0, x1.expand_as(x0)], -1).reshape(-1)[:count] >> (32 - USED_BITS)
    return (bits >= threshold(share)).reshape(list(shape))


def _on_cuda(key: Tensor, draw: int, shape: Sequence[int], share: float) -> Tensor:
    try:
        from entrenar_py.compute import draws_triton
    except ImportError:  # torch without Triton, as on Windows
        return by_torch(key, draw, shape, share)
    return draws_triton.kept(key, draw, shape, threshold(share))


def _as_meta(key: Tensor, draw: int, shape: Sequence[int], share: float) -> Tensor:
    return torch.empty(list(shape), dtype=torch.bool, device=key.device)


_KERNELS: dict[str, Any] = {"CPU": _on_cpu, "CUDA": _on_cuda, "Meta": _as_meta}
for _place, _kernel in _KERNELS.items():
    _LIBRARY.impl("kept", _kernel, _place)
