"""Decompositions of torch's operations into the operations of a captured graph.

They extend torch's core decompositions, so that fewer operations need a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

# Convolutions, forward and backward, as matrix products of patches; and the maximum of a patch.
#
# A patch is the part of the input that the kernel covers for one place of the output. Patches are
# views of the padded input: they overlap in memory until a product reads them. Any number of
# spatial dims, and any stride, padding, dilation and number of groups is possible. Transposed
# convolutions are not decomposed and have no kernel.


@dataclass(frozen=True)
class Window:
    """The kernel's stride, padding and dilation: a number for each spatial dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def of_rank(self, rank: int) -> Window:
        """Return the same window for `rank` dims; a single number applies to all dims."""
        parts = (self.stride, self.padding, self.dilation)
        return Window(*(list(one) * (rank if len(one) == 1 else 1) for one in parts))

    def extent(self, dim: int, size: int) -> int:
        """Return the extent along `dim` of a kernel with `size` elements, dilation included."""
        return self.dilation[dim] * (size - 1) + 1


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Sequence[int],
    groups: int,
) -> Any:
    """Return the convolution of x [n, c, *] and weight [o, c / groups, *], [n, o, *].

    Returns NotImplemented for a transposed convolution.
    """
    if transposed:
        return NotImplemented
    window = Window(stride, padding, dilation).of_rank(x.dim() - 2)
    result = _correlate(_padded(x, window), weight, window, groups)
    if bias is not None:
        result = result + bias.reshape(1, -1, *(1 for _ in window.stride))
    return result.contiguous()  # as torch's own results are


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    __: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Return the gradients of x, weight and bias, None for those that `output_mask` excludes."""
    if transposed:
        return NotImplemented
    window = Window(stride, padding, dilation).of_rank(x.dim() - 2)
    spatial = list(range(2, x.dim()))
    return (
        _of_input(gradient, x, weight, window, groups).contiguous() if output_mask[0] else None,
        _of_weight(gradient, x, weight, window, groups) if output_mask[1] else None,
        gradient.sum([0, *spatial]) if output_mask[2] else None,
    )


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Return the largest element of each patch of x [n, c, h, w], and its index within h * w.

    Returns NotImplemented with `ceil_mode` or without the dim n.
    """
    if ceil_mode or x.dim() != 4:
        return NotImplemented
    kernel = list(kernel) * (2 if len(kernel) == 1 else 1)
    window = Window(stride or kernel, padding, dilation).of_rank(2)
    patches = _patches(_padded(x, window, -torch.inf), kernel, window)
    flat = patches.reshape(*patches.shape[:4], -1)  # [n, c, *places, kernel]
    tap = flat.argmax(-1)
    row, column = tap // kernel[1], tap % kernel[1]
    at = []
    for dim, inner in enumerate((row, column)):
        place = torch.arange(inner.shape[2 + dim]) * window.stride[dim] - window.padding[dim]
        across = place.reshape(-1, 1) if dim == 0 else place
        at.append(across + inner * window.dilation[dim])
    return flat.amax(-1), at[0] * x.shape[3] + at[1]


def max_pool_backward(gradient: Tensor, x: Tensor, *window: Any) -> Tensor:
    """Return the gradient of x: each output's gradient, added at the index from `max_pool`."""
    indices: Tensor = window[-1]
    flat = torch.zeros(*x.shape[:2], x.shape[2] * x.shape[3])
    return flat.scatter_add(2, indices.flatten(2), gradient.flatten(2)).reshape(x.shape)


def _padded(x: Tensor, window: Window, filler: float = 0.0) -> Tensor:
    widths = [width for one in reversed(window.padding) for width in (one, one)]
    return torch.constant_pad_nd(x, widths, filler) if any(widths) else x


def _patches(x: Tensor, kernel: Sequence[int], window: Window) -> Tensor:
    """Return the patches: x [n, c, *] -> [n, c, *places, *kernel], a view."""
    rank = len(kernel)
    for dim, size in enumerate(kernel):
        x = x.unfold(2 + dim, window.extent(dim, size), window.stride[dim])
    for dim, step in enumerate(window.dilation):
        if step > 1:
            place = 2 + rank + dim
            x = torch.ops.aten.slice.Tensor(x, place, 0, x.shape[place], step)
    return x


def _grouped(x: Tensor, groups: int) -> Tensor:
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(0, 1)


def _correlate(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """Return the convolution of an input that is already padded."""
    outputs, inputs, *kernel = weight.shape
    patches = _patches(x, kernel, window)
    rank = len(kernel)
    places = patches.shape[2 : 2 + rank]
    if inputs == 1 and outputs == groups:  # one channel each: too little for a product
        taps = weight.reshape(1, outputs, *(1 for _ in places), *kernel)
        return (patches * taps).sum(list(range(2 + rank, patches.dim())))
    rows = _rows(patches, groups, rank)  # [groups, n * places, c / groups * kernel]
    matrix = weight.reshape(groups, outputs // groups, inputs * prod(kernel))
    result = torch.bmm(rows, matrix.transpose(1, 2))  # [groups, n * places, o / groups]
    apart = result.reshape(groups, x.shape[0], *places, outputs // groups)
    order = [1, 0, 2 + rank, *range(2, 2 + rank)]
    return apart.permute(order).reshape(x.shape[0], outputs, *places)


def _rows(patches: Tensor, groups: int, rank: int) -> Tensor:
    """Return patches as rows: [groups, n * places, c / groups * kernel]."""
    parts = _grouped(patches, groups)  # [groups, n, c / groups, *places, *kernel]
    turned = parts.permute(0, 1, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    inner = prod(turned.shape[2 + rank :])
    return turned.reshape(groups, -1, inner)


def _of_weight(gradient: Tensor, x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """Return the weight's gradient: the output's gradient times the patches, summed over places."""
    outputs, _, *kernel = weight.shape
    rank = len(kernel)
    patches = _patches(_padded(x, window), kernel, window)
    channels = _grouped(gradient, groups)  # [groups, n, o / groups, *places]
    columns = channels.transpose(1, 2).reshape(groups, outputs // groups, -1)
    return torch.bmm(columns, _rows(patches, groups, rank)).reshape(weight.shape)


def _of_input(gradient: Tensor, x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """Return the input's gradient, from the output's gradient, spread, and the flipped kernel."""
    outputs, inputs, *kernel = weight.shape
    spatial = list(range(2, x.dim()))
    widths: list[int] = []
    for dim, size in reversed(list(enumerate(kernel))):
        reach = window.extent(dim, size) - 1
        spread = (gradient.shape[2 + dim] - 1) * window.stride[dim] + 1
        whole = x.shape[2 + dim] + 2 * window.padding[dim]
        # the last places, which the kernel never covers, get zero
        widths += [reach, whole - spread]
    apart = gradient
    for dim, step in zip(spatial, window.stride, strict=True):
        apart = _spread(apart, dim, step)
    turned = weight.reshape(groups, outputs // groups, inputs, *kernel).transpose(1, 2)
    turned = turned.reshape(groups * inputs, outputs // groups, *kernel).flip(spatial)
    once = Window([1] * len(kernel), [0] * len(kernel), window.dilation)
    result = _correlate(torch.constant_pad_nd(apart, widths), turned, once, groups)
    for dim, width in zip(spatial, window.padding, strict=True):
        result = result.narrow(dim, width, x.shape[dim])
    return result


def _spread(x: Tensor, dim: int, step: int) -> Tensor:
    """Return `x` with step - 1 zeros between its elements along `dim`."""
    if step == 1:
        return x
    last = x.movedim(dim, -1)
    padded = torch.constant_pad_nd(last.unsqueeze(-1), [0, step - 1])
    flat = padded.reshape(*last.shape[:-1], last.shape[-1] * step)
    return flat.narrow(-1, 0, (last.shape[-1] - 1) * step + 1).movedim(-1, dim)


# Sorting by counting, and products of rows by the matrix of their group (experts).
#
# An element's place is the number of elements before it. This takes n^2 comparisons for n elements,
# which a device does in parallel, and equal elements keep their order.


def sort(x: Tensor, dim: int = -1, descending: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the elements of `x` in order along `dim`, and their indices; NaN is the largest.

    The sort is always stable.
    """
    return _first(x, x.shape[dim] if x.dim() else 1, dim, descending=descending)


def sort_stable(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the result of `sort`, for torch's overload with `stable`."""
    return sort(x, dim, descending)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the `k` largest (or smallest) elements along `dim`, in order, and their indices."""
    return _first(x, k, dim, descending=largest)


def _first(x: Tensor, count: int, dim: int, *, descending: bool) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    places = _places(x.movedim(dim, -1), descending=descending)  # [..., n]
    numbers = torch.arange(places.shape[-1])
    wanted = torch.arange(count)[:, None]
    here = places.unsqueeze(-2) == wanted  # [..., count, n]
    indices = torch.where(here, numbers, 0).sum(-1).movedim(-1, dim)
    return x.gather(dim, indices), indices


def _places(x: Tensor, *, descending: bool) -> Tensor:
    """Return each element's place in the order along the last dim, int64."""
    element, other = x.unsqueeze(-1), x.unsqueeze(-2)  # [..., n, 1] and [..., 1, n]
    is_before = other > element if descending else other < element
    is_equal = other == element
    if x.is_floating_point():
        nan, other_nan = element.isnan(), other.isnan()
        is_before = is_before | ((other_nan & ~nan) if descending else (nan & ~other_nan))
        is_equal = is_equal | (nan & other_nan)
    numbers = torch.arange(x.shape[-1])
    is_earlier = numbers < numbers[:, None]
    return (is_before | (is_equal & is_earlier)).to(torch.int64).sum(-1)


def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """Return how many elements lie in each of `bins` equal parts of [low, high].

    Returns NotImplemented if low == high, for which torch uses the range of the elements.
    """
    if low == high:
        return NotImplemented
    flat = x.reshape(-1, 1)
    place = ((flat - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    is_there = (place == torch.arange(bins)) & (flat >= low) & (flat <= high)
    return is_there.to(x.dtype).sum(0)


def grouped_mm(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Any = None, *_: Any
) -> Any:
    """Return products of groups: group g ends before row (or column) `offsets[g]` of `a`.

    Rows a [s, k] with matrices b [g, k, n] give [s, n]. Columns a [k, s] with rows b [s, n] give
    [g, k, n]. The computation is dense: each group's product uses all of `a`, with elements outside
    the group masked. Returns NotImplemented for other ranks.
    """
    if offsets is None or bias is not None or (a.dim(), b.dim()) not in ((2, 3), (2, 2)):
        return NotImplemented
    count = a.shape[0] if b.dim() == 3 else a.shape[1]
    is_member = _members(offsets, count)  # [g, s]
    num_groups = is_member.shape[0]
    if b.dim() == 3:
        products = torch.bmm(a.expand(num_groups, *a.shape), b)  # [g, s, n]
        return torch.where(is_member.unsqueeze(-1), products, 0.0).sum(0)
    columns = torch.where(is_member.unsqueeze(1), a, 0.0)  # [g, k, s]
    return torch.bmm(columns, b.expand(num_groups, *b.shape))


def _members(offsets: Tensor, count: int) -> Tensor:
    """Return which of `count` rows belong to each group, bool [groups, count]."""
    rows = torch.arange(count)
    ends = offsets.to(torch.int64).unsqueeze(-1)
    starts = torch.constant_pad_nd(ends, [0, 0, 1, -1])
    return (rows >= starts) & (rows < ends)


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
    """Return variance and mean, from x - mean: a difference of two squares would lose digits."""
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
    """Return each channel normalised, with running statistics unless `training`.

    Returns NotImplemented for running statistics in training, because the operation would write to
    them.
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
    source = source.to(x.dtype)
    return _ATEN.alias.default(source) if source.shape == x.shape else source.expand(x.shape)


def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        x = torch.index_select(x, dim, torch.arange(x.shape[dim] - 1, -1, -1))
    return x


def _empty(shape: Sequence[int], *_: Any, dtype: Any = None, **__: Any) -> Tensor:
    """Return zeros, because uninitialised memory would have different values in each run."""
    return torch.zeros(shape, dtype=dtype or torch.float32)


def _full_like(x: Tensor, value: float, *, dtype: Any = None, **_: Any) -> Tensor:
    return torch.full(x.shape, value, dtype=dtype or x.dtype)


_OURS: dict[Any, Callable[..., Any]] = {
    _ATEN._unsafe_index_put.default: _ATEN.index_put.default,
    _ATEN.addmm.default: _addmm,
    _ATEN._grouped_mm.default: grouped_mm,
    _ATEN.convolution.default: convolution,
    _ATEN.convolution_backward.default: convolution_backward,
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
    _ATEN.histc.default: histc,
    _ATEN.max_pool2d_with_indices.default: max_pool,
    _ATEN.max_pool2d_with_indices_backward.default: max_pool_backward,
    _ATEN.mean.default: _mean,
    _ATEN.mean.dim: _mean,
    _ATEN.mul.Scalar: _ATEN.mul.Tensor,
    _ATEN.native_batch_norm.default: _native_batch_norm,
    _ATEN.native_layer_norm.default: _native_layer_norm,
    _ATEN.scalar_tensor.default: lambda value, *, dtype=None, **_: torch.full(
        (), value, dtype=dtype or torch.float32
    ),
    _ATEN.sort.default: sort,
    _ATEN.sort.stable: sort_stable,
    _ATEN.split_with_sizes.default: _split_with_sizes,
    _ATEN.topk.default: topk,
    _ATEN.var.correction: lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    _ATEN.var_mean.correction: _var_mean,
}
