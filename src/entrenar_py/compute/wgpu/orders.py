"""Sorting by counting, and products of rows by the matrix of their group (experts).

An element's place is the number of elements before it. So n elements take n^2 comparisons, which a
device makes at once, and equal elements keep their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sort(x: Tensor, dim: int = -1, descending: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the elements of `x` in order along `dim`, and their indices; NaN is the largest.

    Always stable, so `stable` is ignored.
    """
    return _first(x, x.shape[dim] if x.dim() else 1, dim, descending=descending)


def sort_stable(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Return what `sort` does: the overload in which `stable` is said."""
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
    """Return for each element of the last dim how many come before it, int64."""
    one, other = x.unsqueeze(-1), x.unsqueeze(-2)  # [..., n, 1] and [..., 1, n]
    is_before = other > one if descending else other < one
    is_equal = other == one
    if x.is_floating_point():
        nan, other_nan = one.isnan(), other.isnan()
        is_before = is_before | ((other_nan & ~nan) if descending else (nan & ~other_nan))
        is_equal = is_equal | (nan & other_nan)
    numbers = torch.arange(x.shape[-1])
    is_earlier = numbers < numbers[:, None]
    return (is_before | (is_equal & is_earlier)).to(torch.int64).sum(-1)


def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """Return how many elements lie in each of `bins` equal parts of [low, high].

    NotImplemented if low == high, for which torch takes the range of the elements.
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
    [g, k, n]. Dense: each group's product is made with all of `a`, and what is not of the group is
    masked. NotImplemented for other ranks.
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
    """Return for each group which of `count` rows are its own, bool [groups, count]."""
    rows = torch.arange(count)
    ends = offsets.to(torch.int64).unsqueeze(-1)
    starts = torch.constant_pad_nd(ends, [0, 0, 1, -1])
    return (rows >= starts) & (rows < ends)
