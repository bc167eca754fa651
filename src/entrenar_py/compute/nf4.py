"""Matrices in NF4 with double quantisation, as operations of torch.

A weight is one of 16 levels times the scale of its block of 64 weights, in C order. A scale is one
of 256 levels times the second-level scale of its block of 256 scales, plus the mean of all scales.
`decode` is a single operation of a captured graph, so that a backend can decode weights while a
product loads its operand. Source: "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al.,
2023), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

BLOCK, SECOND_BLOCK, NUM_SECOND_LEVELS = 64, 256, 256
MEAN = NUM_SECOND_LEVELS  # index of the mean in the table of scales
LEVELS = (  # levels of a weight: appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@torch.library.custom_op("entrenar::nf4", mutates_args=())
def decode(
    codes: Tensor, scales: Tensor, second: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the decoded matrix of `shape`, computed in float32 and converted to `dtype`.

    `codes` is uint8 [ceil(n / 2)], with the first of two weights in the high half of a byte.
    `scales` is uint8 [blocks]. `second` is float32: the 256 levels of scales, their mean, the
    second-level scales. The result has the same bits as with bitsandbytes, which computes it if
    installed. If `second` is float64, the computation uses float64.
    """
    size = prod(shape)
    functional = _bitsandbytes() if second.dtype == torch.float32 and size % BLOCK == 0 else None
    if functional is None:
        spread = second[scales.int()] * second_scales(second, len(scales)) + second[MEAN]
        weights = levels(codes, size) * spread.repeat_interleave(BLOCK)[:size]
        return weights.reshape(list(shape)).to(dtype)
    ops = torch.ops.bitsandbytes
    spread = ops.dequantize_blockwise.default(
        scales, second[MEAN + 1 :], second[:MEAN], SECOND_BLOCK, torch.float32
    )
    # bitsandbytes 0.50 decodes rows that end within a block wrongly on some CPUs: pass whole
    # blocks.
    rows = [size // BLOCK, BLOCK]
    matrix: Tensor = ops.dequantize_4bit.default(
        codes.reshape(-1, 1), spread + second[MEAN], BLOCK, "nf4", rows, dtype
    )
    return matrix.reshape(list(shape))


def _like(
    codes: Tensor, scales: Tensor, second: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(list(shape), dtype=dtype)


decode.register_fake(_like)


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of whole blocks of weights, and the scale of each block.

    The weights are a vector on the CPU. The codes are uint8 [n / 2, 1], two a byte, as `decode`
    takes them. The scales are float32 [blocks]. Finite weights have the bits of bitsandbytes 0.50.
    """
    blocks = weights.reshape(-1, BLOCK).float()
    scales = blocks.abs().amax(1)
    blocks = (blocks * scales.clamp(min=_LEAST).reciprocal()[:, None]).clamp_(-1, 1)
    shares = blocks.reshape(-1).numpy()
    codes, is_above = np.zeros(shares.shape, np.uint8), np.empty(shares.shape, np.bool_)
    for middle in _MIDDLES:  # NumPy compares six times as fast as torch
        codes += np.greater(shares, middle, out=is_above).view(np.uint8)
    return torch.from_numpy(codes[::2] << 4 | codes[1::2])[:, None], scales


_LEAST = 1e-38  # a block of zeros has no scale to divide by
_levels = np.array(LEVELS, np.float32)
_MIDDLES = (_levels[:-1] + _levels[1:]) / np.float32(2)


def levels(codes: Tensor, size: int) -> Tensor:
    """Return the levels of the first `size` codes, without their scales: float32 [size]."""
    numbers = codes.reshape(-1).int()
    pairs = torch.stack([numbers >> 4, numbers & 15], -1)
    return torch.tensor(LEVELS, device=codes.device)[pairs.reshape(-1)[:size]]


def second_scales(second: Tensor, num_blocks: int) -> Tensor:
    """Return the second-level scale of each of the first `num_blocks` blocks of weights."""
    return second[MEAN + 1 :].repeat_interleave(SECOND_BLOCK)[:num_blocks]


def linear(x: Tensor, bias: Tensor | None, stored: Sequence[Tensor], rows: int) -> Tensor:
    """Return `F.linear(x, weight, bias)` for a weight of `rows` rows in NF4.

    `stored` are the tensors of `decode`. The decoded weight is not kept for the backward pass.
    """
    found: Tensor = _Linear.apply(x, bias, rows, *stored)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, rows: int, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.shape = [rows, x.shape[-1]]
        return F.linear(x, decode(*stored, ctx.shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        weight = decode(*ctx.saved_tensors, ctx.shape, gradient.dtype)
        over = list(range(gradient.dim() - 1))
        bias = gradient.sum(over) if ctx.needs_input_grad[1] else None
        return gradient @ weight, bias, None, None, None, None


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError:
        return None
    return functional
