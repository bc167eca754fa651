"""Convolutions, forward and backward, as matrix products of patches; and the maximum of a patch.

A patch is what the kernel covers at one place of the output. Patches are views of the padded input:
they overlap in memory until a product reads them. Any number of spatial dims, any stride, padding,
dilation and number of groups. Transposed convolutions aren't made of these and have no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """How the kernel moves: a number for each spatial dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def of_rank(self, rank: int) -> Window:
        """Return the same window for `rank` dims: a single number is that of all dims."""
        parts = (self.stride, self.padding, self.dilation)
        return Window(*(list(one) * (rank if len(one) == 1 else 1) for one in parts))

    def extent(self, dim: int, size: int) -> int:
        """Return how many places a kernel with `size` elements along `dim` reaches over."""
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

    NotImplemented for a transposed one.
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

    NotImplemented with `ceil_mode` or without the dim n.
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
    """Return the gradient of x: each output's, added at the index that `max_pool` chose."""
    indices: Tensor = window[-1]
    flat = torch.zeros(*x.shape[:2], x.shape[2] * x.shape[3])
    return flat.scatter_add(2, indices.flatten(2), gradient.flatten(2)).reshape(x.shape)


def _padded(x: Tensor, window: Window, filler: float = 0.0) -> Tensor:
    widths = [width for one in reversed(window.padding) for width in (one, one)]
    return torch.constant_pad_nd(x, widths, filler) if any(widths) else x


def _patches(x: Tensor, kernel: Sequence[int], window: Window) -> Tensor:
    """Return what the kernel covers: x [n, c, *] -> [n, c, *places, *kernel], a view."""
    rank = len(kernel)
    for dim, size in enumerate(kernel):
        x = x.unfold(2 + dim, window.extent(dim, size), window.stride[dim])
    for dim, step in enumerate(window.dilation):
        if step > 1:
            place = 2 + rank + dim
            x = torch.ops.aten.slice.Tensor(x, place, 0, x.shape[place], step)
    return x


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return x [n, c, *] as [groups, n, c / groups, *]."""
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(0, 1)


def _correlate(x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """Return the convolution of an input that is padded already."""
    outputs, inputs, *kernel = weight.shape
    patches = _patches(x, kernel, window)
    rank = len(kernel)
    places = patches.shape[2 : 2 + rank]
    if inputs == 1 and outputs == groups:  # a channel each: too little for a product
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
    """Return the weight's gradient: the output's, times the patches, added over all places."""
    outputs, _, *kernel = weight.shape
    rank = len(kernel)
    patches = _patches(_padded(x, window), kernel, window)
    channels = _grouped(gradient, groups)  # [groups, n, o / groups, *places]
    columns = channels.transpose(1, 2).reshape(groups, outputs // groups, -1)
    return torch.bmm(columns, _rows(patches, groups, rank)).reshape(weight.shape)


def _of_input(gradient: Tensor, x: Tensor, weight: Tensor, window: Window, groups: int) -> Tensor:
    """Return the input's gradient: the output's, spread by the stride, with the kernel turned."""
    outputs, inputs, *kernel = weight.shape
    spatial = list(range(2, x.dim()))
    widths: list[int] = []
    for dim, size in reversed(list(enumerate(kernel))):
        reach = window.extent(dim, size) - 1
        spread = (gradient.shape[2 + dim] - 1) * window.stride[dim] + 1
        whole = x.shape[2 + dim] + 2 * window.padding[dim]
        widths += [reach, whole - spread]  # the last places, which no kernel covers, get zero
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
