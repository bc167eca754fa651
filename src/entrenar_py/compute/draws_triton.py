"""The draws of `draws` on CUDA, in one Triton kernel. Triton comes with torch."""

# The types of a kernel are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from entrenar_py.compute import draws

_BLOCK = 1024  # elements per program
_PARITY = tl.constexpr(draws.PARITY)


@triton.jit
def _rounds(x0, x1, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Return the words after four rounds with these rotations."""
    x0 += x1
    x1 = ((x1 << a) | (x1 >> (32 - a))) ^ x0
    x0 += x1
    x1 = ((x1 << b) | (x1 >> (32 - b))) ^ x0
    x0 += x1
    x1 = ((x1 << c) | (x1 >> (32 - c))) ^ x0
    x0 += x1
    x1 = ((x1 << d) | (x1 >> (32 - d))) ^ x0
    return x0, x1


@triton.jit(do_not_specialize=["draw", "least", "count"])
def _draw(key, out, draw, least, count, block: tl.constexpr):
    """Write, for each element from 0 to `count` - 1, whether its 24 bits are `least` or more."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    first = tl.load(key).to(tl.uint32, bitcast=True)
    second = tl.load(key + 1).to(tl.uint32, bitcast=True)
    third = first ^ second ^ _PARITY
    x0 = (index >> 1).to(tl.uint32) + first
    x1 = tl.full([block], draw, tl.uint32) + second
    x0, x1 = _rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + second, x1 + third + 1
    x0, x1 = _rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + third, x1 + first + 2
    x0, x1 = _rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + first, x1 + second + 3
    x0, x1 = _rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + second, x1 + third + 4
    x0, x1 = _rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + third, x1 + first + 5
    bits = tl.where((index & 1) == 0, x0, x1) >> 8
    tl.store(out + index, bits.to(tl.int32) >= least, mask=index < count)


def kept(key: Tensor, draw: int, shape: Sequence[int], least: int) -> Tensor:
    """Return whether each element's bits are >= `least`, bool `shape` on the key's GPU."""
    count = prod(shape)
    out = torch.empty(list(shape), dtype=torch.bool, device=key.device)
    if count:
        with torch.cuda.device(key.device):
            _draw[(triton.cdiv(count, _BLOCK),)](key, out, draw, least, count, block=_BLOCK)
    return out
