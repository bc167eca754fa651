"""Decompositions of torch's operations into the operations of a captured graph.

Extends torch's core decompositions, so that fewer operations need a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from entrenar_py.compute.wgpu import convolutions, orders

_ATEN = torch.ops.aten
_FROM_TORCH = (
    _ATEN._log_softmax,
    _ATEN._softmax,
    _ATEN.elu,
    _ATEN.leaky_relu,
    _ATEN.hardtanh,
    _ATEN.native_batch_norm_backward,
)


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """Return a dict: operation -> function of the same arguments that calls simpler operations."""
    return {**core_aten_decompositions(), **get_decompositions(_FROM_TORCH), **_OURS}


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = 1,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the variance from x - mean: the difference of two squares would lose digits."""
    dims = list(dim) if dim else list(range(x.ndim))
    count = prod(x.shape[one] for one in dims)
    mean = torch.mean(x, dims, keepdim=True)
    square = torch.sum(torch.square(x - mean), dims, keepdim=keepdim)
    variance = square / max(0.0, count - (1 if correction is None else correction))
    return variance, mean if keepdim else torch.squeeze(mean, dims)


def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    variance, mean = _var_mean(x, dims, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    result = (x - mean) * scale
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result, mean, scale


def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise each channel, by running statistics if not `training`.

    NotImplemented for running statistics in training: the operation would write to them.
    """
    if training and mean is not None:
        return NotImplemented
    shape = [1, -1, *(1 for _ in range(x.dim() - 2))]
    saved = torch.zeros(0), torch.zeros(0)
    if mean is None or variance is None:
        others = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = _var_mean(x, others, correction=0)
        saved = mean, torch.rsqrt(variance + eps)
    scale = torch.rsqrt(variance + eps)
    result = (x - mean.reshape(shape)) * scale.reshape(shape)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result, *saved


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _ATEN.slice.Tensor(x, dim, start, start + size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    dims = list(dim) if dim else list(range(x.ndim))
    return torch.sum(x, dims, keepdim, dtype=dtype) / prod(x.shape[one] for one in dims)


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(a, b)
    return torch.add(x if beta == 1 else x * beta, product if alpha == 1 else product * alpha)


def _embedding_dense_backward(
    gradient: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_by_freq: bool
) -> Any:
    if scale_by_freq:
        return NotImplemented
    if padding_idx >= 0:
        padded = (indices == padding_idx).unsqueeze(-1)
        gradient = torch.where(padded, torch.zeros_like(gradient), gradient)
    start = torch.zeros(num_weights, gradient.shape[-1])
    return _ATEN.index_put.default(start, [indices], gradient, True)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the new contents of `x` after `x.copy_(source)`."""
    source = source.to(x.dtype)
    return _ATEN.alias.default(source) if source.shape == x.shape else source.expand(x.shape)


def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        x = torch.index_select(x, dim, torch.arange(x.shape[dim] - 1, -1, -1))
    return x


def _empty(shape: Sequence[int], *_: Any, dtype: Any = None, **__: Any) -> Tensor:
    """Return zeros: memory that is not written to would have other values in each run."""
    return torch.zeros(shape, dtype=dtype or torch.float32)


def _full_like(x: Tensor, value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return torch.full(x.shape, value, dtype=dtype or x.dtype)


_OURS: dict[Any, Callable[..., Any]] = {
    _ATEN._unsafe_index_put.default: _ATEN.index_put.default,
    _ATEN.addmm.default: _addmm,
    _ATEN._grouped_mm.default: orders.grouped_mm,
    _ATEN.convolution.default: convolutions.convolution,
    _ATEN.convolution_backward.default: convolutions.convolution_backward,
    _ATEN.copy.default: _copy,
    _ATEN.div.Scalar: _ATEN.div.Tensor,
    _ATEN.embedding_dense_backward.default: _embedding_dense_backward,
    **dict.fromkeys((_ATEN.empty.memory_format, _ATEN.empty_permuted.default), _empty),
    _ATEN.empty_like.default: lambda x, *, dtype=None, **_: _empty(x.shape, dtype=dtype or x.dtype),
    # WGSL has neither function, so both lose accuracy near zero.
    _ATEN.expm1.default: lambda x: torch.exp(x) - 1,
    _ATEN.log1p.default: lambda x: torch.log(x + 1),
    _ATEN.flip.default: _flip,
    _ATEN.full_like.default: _full_like,
    _ATEN.gelu.default: _gelu,
    _ATEN.histc.default: orders.histc,
    _ATEN.max_pool2d_with_indices.default: convolutions.max_pool,
    _ATEN.max_pool2d_with_indices_backward.default: convolutions.max_pool_backward,
    _ATEN.mean.default: _mean,
    _ATEN.mean.dim: _mean,
    _ATEN.mul.Scalar: _ATEN.mul.Tensor,
    _ATEN.native_batch_norm.default: _native_batch_norm,
    _ATEN.native_layer_norm.default: _native_layer_norm,
    _ATEN.scalar_tensor.default: lambda value, *, dtype=None, **_: torch.full(
        (), value, dtype=dtype or torch.float32
    ),
    _ATEN.sort.default: orders.sort,
    _ATEN.sort.stable: orders.sort_stable,
    _ATEN.split_with_sizes.default: _split_with_sizes,
    _ATEN.topk.default: orders.topk,
    _ATEN.var.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    _ATEN.var_mean.correction: _var_mean,
}
