"""XXH3-128 of chunks in numpy, written from its specification, which the GPU's kernel follows.

It replaces the kernel where there is no Triton, is called in the same way, and uses the same
tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.compute.digest import CHUNK_BYTES

Words = NDArray[np.uint64]


def hash_chunks(words: Words, secret: Words) -> list[tuple[int, int]]:
    """Return the low and the high half of XXH3-128 of each of `words` [chunks, 1024].

    `secret` is as `digest.secrets` returns it.
    """
    lanes: Words = np.tile(secret[48:56], (len(words), 1))
    blocks = words.reshape(len(words), 8, 16, 8)
    for block in range(8):
        for at in range(16):
            stripe = blocks[:, block, at]
            key = 24 if (block, at) == (7, 15) else at
            keyed = stripe ^ secret[key : key + 8]
            neighbour = stripe.reshape(-1, 4, 2)[:, :, ::-1].reshape(-1, 8)
            lanes += (keyed & 0xFFFFFFFF) * (keyed >> 32) + neighbour
        if block < 7:
            lanes ^= (lanes >> np.uint64(47)) ^ secret[16:24]
            lanes *= np.uint64(0x9E3779B1)
    start = CHUNK_BYTES * 0x9E3779B185EBCA87, ~(CHUNK_BYTES * 0xC2B2AE3D27D4EB4F)
    return [
        (_merge(one ^ secret[32:40], start[0]), _merge(one ^ secret[40:48], start[1]))
        for one in lanes
    ]


def _merge(keyed: Words, start: int) -> int:
    ones = 2**64 - 1
    products = [int(a) * int(b) for a, b in keyed.reshape(4, 2)]
    mixed = (start + sum((one & ones) ^ (one >> 64) for one in products)) & ones
    mixed = (mixed ^ (mixed >> 37)) * 0x165667919E3779F9 & ones
    return mixed ^ (mixed >> 32)


class Model:
    """`kernels.hash_chunks` on the CPU, chunk by chunk."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._run

    def _run(
        self,
        address: Tensor,
        num_words: Tensor,
        tensor: Tensor,
        slot: Tensor,
        kinds: Tensor,
        secret: Tensor,
        out: Tensor,
        num_chunks: int,
        **_: int,
    ) -> None:
        keys, told, written = (_unsigned(one) for one in (secret, kinds, out))
        words = np.zeros((num_chunks, CHUNK_BYTES // 8), np.uint64)
        for chunk in range(num_chunks):
            ctypes.memmove(words[chunk].ctypes.data, int(address[chunk]), 8 * int(num_words[chunk]))
        for chunk, halves in enumerate(hash_chunks(words, keys)):
            written[int(slot[chunk]) :][:2] = halves
            exponent, carry, top = told.reshape(-1, 3)[tensor[chunk]]
            if ((words[chunk] & exponent) + carry & top).any():
                written[4 * int(tensor[chunk]) + 2] |= np.uint64(1)


def _unsigned(tensor: Tensor) -> Words:
    """Return the same memory as unsigned words."""
    return tensor.numpy().reshape(-1).view(np.uint64)
