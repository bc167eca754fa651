"""Reductions along any dims, and operations built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.compute.wgpu import pointwise, views
from entrenar_py.compute.wgpu.emitter import Emitter, Fold
from entrenar_py.compute.wgpu.index import Indices
from entrenar_py.compute.wgpu.values import FEW_ROWS, Schedule, Value

_COST = 8  # of a reduction's result
# A workgroup computes one result. Long folds to few results take two steps, to use more workgroups.
_LONG_FOLD = 2**14
_PARTS_MAX = 1024

FOLDS = {
    ("sum", "f32"): Fold("{0} + {1}", "0.0f", "f32"),
    ("sum", "i32"): Fold("{0} + {1}", "0", "i32"),
    ("prod", "f32"): Fold("{0} * {1}", "1.0f", "f32"),
    ("prod", "i32"): Fold("{0} * {1}", "1", "i32"),
    ("amax", "f32"): Fold("larger({0}, {1})", "(-infinity())", "f32"),
    ("amax", "i32"): Fold("max({0}, {1})", "(-2147483647 - 1)", "i32"),
    ("amin", "f32"): Fold("smaller({0}, {1})", "infinity()", "f32"),
    ("amin", "i32"): Fold("min({0}, {1})", "2147483647", "i32"),
    ("any", "bool"): Fold("{0} | {1}", "false", "bool"),
}


def reduce(
    schedule: Schedule, value: Value, fold: Fold, dims: Sequence[int], *, keepdim: bool
) -> Value:
    """Fold `value`, which has the fold's dtype, along `dims`, or along all dims if empty."""
    rank = len(value.shape)
    over = sorted({dim % rank for dim in dims}) if dims and rank else list(range(rank))
    folded = _fold_along(schedule, value, fold, over)
    kept = [size for dim, size in enumerate(value.shape) if dim not in over]
    return folded if keepdim else views.reshape(schedule, folded, kept)


def _fold_along(schedule: Schedule, value: Value, fold: Fold, over: Sequence[int]) -> Value:
    """Fold along the dims `over`, and keep them with size 1."""
    num_folded = math.prod(value.shape[dim] for dim in over)
    if num_folded > _LONG_FOLD and value.size // num_folded < FEW_ROWS:
        dim = max(over, key=value.shape.__getitem__)
        size = value.shape[dim]
        parts = next(one for one in range(min(size, _PARTS_MAX), 0, -1) if size % one == 0)
        if parts > 1:
            return _fold_twice(schedule, value, fold, over, dim, parts)
    if value.product is not None or not _within_rows(value, set(over)):
        schedule.realise(value)
    if num_folded == 1:
        return value
    token, recipe = object(), value.read

    def read(emitter: Emitter, indices: Indices) -> str:
        def body(inner: Indices) -> str:
            whole = list(indices)
            for dim, one in zip(over, inner, strict=True):
                whole[dim] = one
            return recipe(emitter, tuple(whole))

        sizes = [value.shape[dim] for dim in over]
        return emitter.reduce((token, indices), fold, sizes, body)

    shape = tuple(1 if dim in over else size for dim, size in enumerate(value.shape))
    return Value(shape, fold.dtype, read, reads=value.reads, cost=_COST, rows=len(shape))


def _fold_twice(
    schedule: Schedule, value: Value, fold: Fold, over: Sequence[int], dim: int, parts: int
) -> Value:
    """Fold in two steps: within each of `parts` equal parts of `dim`, then over the parts."""
    shape = value.shape
    cut = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    inner = [one + (one >= dim) for one in over]  # the parts stay
    apart = _fold_along(schedule, views.reshape(schedule, value, cut), fold, inner)
    schedule.realise(apart)
    whole = views.reshape(schedule, apart, (*apart.shape[: dim + 1], *apart.shape[dim + 2 :]))
    return _fold_along(schedule, whole, fold, [dim])


def _within_rows(value: Value, over: set[int]) -> bool:
    """Return whether `over` has all dims inside a pending row, and no dim that selects a row."""
    if value.rows is None:
        return True
    columns = {dim for dim, size in enumerate(value.shape) if dim >= value.rows and size > 1}
    rows = {dim for dim, size in enumerate(value.shape) if dim < value.rows and size > 1}
    return columns <= over and not rows & over


def cumulative_sum(schedule: Schedule, value: Value, dim: int) -> Value:
    """Return cumulative sums along `dim`, with O(n^2) additions for n elements."""
    dim %= max(1, len(value.shape))
    schedule.realise(value)
    size = value.shape[dim]
    square = (*value.shape, size)
    order = [*range(dim), len(value.shape), *range(dim + 1, len(value.shape)), dim]
    spread = views.expand(schedule, views.reshape(schedule, value, (*value.shape, 1)), square)
    spread = views.permute(schedule, spread, order)  # [..., to, ..., from]
    to = pointwise.counting(0, 1, square, dim, "i32")
    start = pointwise.counting(0, 1, square, len(value.shape), "i32")
    before = pointwise.fuse(schedule, "{0} <= {1}", [start, to], square, "bool")
    masked = pointwise.where(schedule, before, spread, 0)
    return reduce(schedule, masked, FOLDS["sum", value.dtype], [-1], keepdim=False)


def arg_extreme(
    schedule: Schedule, value: Value, name: str, dim: int | None, *, keepdim: bool
) -> Value:
    """Return the index of the first largest (`amax`) or smallest (`amin`) element along `dim`."""
    own = value if dim is not None else views.reshape(schedule, value, [value.size])
    dim = 0 if dim is None else dim % max(1, len(own.shape))
    schedule.realise(own)
    extreme = reduce(schedule, own, FOLDS[name, own.dtype], [dim], keepdim=True)
    schedule.realise(extreme)
    place = pointwise.counting(0, 1, own.shape, dim, "i32")
    # A NaN is the extreme element, but not equal to itself.
    same = "{0} == {1} || is_nan({0})" if own.dtype == "f32" else "{0} == {1}"
    here = pointwise.fuse(schedule, same, [own, extreme], own.shape, "bool", cost=2)
    candidates = pointwise.where(schedule, here, place, own.shape[dim] - 1)
    return reduce(schedule, candidates, FOLDS["amin", "i32"], [dim], keepdim=keepdim)
