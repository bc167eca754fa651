"""Sums, extremes and what is made of them, along any dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.backends.wgpu import pointwise, views
from entrenar_py.backends.wgpu.emitter import Emitter, Fold
from entrenar_py.backends.wgpu.index import Indices
from entrenar_py.backends.wgpu.values import FEW_ROWS, Schedule, Value

_COST = 8  # of a reduction's result
# What is folded to few results is folded in two steps: a workgroup has a result to itself, and few
# of them leave a GPU idle.
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
    """`value`, of the fold's dtype, folded along `dims`; no dims stand for all."""
    rank = len(value.shape)
    over = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    num_folded = math.prod(value.shape[dim] for dim in over)
    if num_folded > _LONG_FOLD and value.size // num_folded < FEW_ROWS:
        dim = max(over, key=value.shape.__getitem__)
        parts = _parts(value.shape[dim])
        if parts > 1:
            return _fold_twice(schedule, value, fold, over, dim, parts, keepdim=keepdim)
    if value.product is not None or not _within_rows(value, over):
        schedule.realise(value)
    kept = [dim for dim in range(rank) if dim not in over]
    shape = [1 if dim in over else value.shape[dim] for dim in range(rank)]
    folded = sorted(over)
    token, recipe = object(), value.read

    def read(emitter: Emitter, indices: Indices) -> str:
        def body(inner: Indices) -> str:
            whole = list(indices)
            for dim, one in zip(folded, inner, strict=True):
                whole[dim] = one
            return recipe(emitter, tuple(whole))

        sizes = [value.shape[dim] for dim in folded]
        return emitter.reduce((token, indices), fold, sizes, body)

    found = Value(tuple(shape), fold.dtype, read, reads=value.reads, cost=_COST, rows=len(shape))
    if num_folded == 1 and value.dtype == fold.dtype:
        found = value
    return found if keepdim else views.reshape(schedule, found, [shape[dim] for dim in kept])


def _parts(size: int) -> int:
    """The largest divisor of `size` that is no more than _PARTS_MAX."""
    return next(one for one in range(min(size, _PARTS_MAX), 0, -1) if size % one == 0)


def _fold_twice(
    schedule: Schedule,
    value: Value,
    fold: Fold,
    over: set[int],
    dim: int,
    parts: int,
    *,
    keepdim: bool,
) -> Value:
    """`dim`, one of those folded, in `parts` equal parts first, and then these."""
    shape = value.shape
    cut = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    inner = [one + (one >= dim) for one in over]  # the parts stay
    apart = reduce(schedule, views.reshape(schedule, value, cut), fold, inner, keepdim=True)
    schedule.realise(apart)
    whole = views.reshape(schedule, apart, (*apart.shape[: dim + 1], *apart.shape[dim + 2 :]))
    found = reduce(schedule, whole, fold, [dim], keepdim=True)
    kept = [size for one, size in enumerate(shape) if one not in over]
    return found if keepdim else views.reshape(schedule, found, kept)


def _within_rows(value: Value, over: set[int]) -> bool:
    """True if what is folded is all columns of the rows that are pending, and nothing else."""
    if value.rows is None:
        return True
    columns = {dim for dim, size in enumerate(value.shape) if dim >= value.rows and size > 1}
    rows = {dim for dim, size in enumerate(value.shape) if dim < value.rows and size > 1}
    return columns <= over and not rows & over


def cumulative_sum(schedule: Schedule, value: Value, dim: int) -> Value:
    """Sums of the elements up to each one along `dim`: of a row of n, n^2 / 2 additions."""
    dim %= max(1, len(value.shape))
    schedule.realise(value)
    size = value.shape[dim]
    square = (*value.shape, size)
    order = [*range(dim), len(value.shape), *range(dim + 1, len(value.shape)), dim]
    spread = views.expand(schedule, views.reshape(schedule, value, (*value.shape, 1)), square)
    spread = views.permute(schedule, spread, order)  # [..., to, ..., from]
    to = pointwise.counting(0, 1, square, dim, "i32")
    start = pointwise.counting(0, 1, square, len(value.shape), "i32")
    before = pointwise.fuse(schedule, "{0} <= {1}", [start, to], square, "bool", 1)
    zero = pointwise.constant(0, value.dtype)
    masked = pointwise.fuse(
        schedule, "select({1}, {0}, {2})", [spread, zero, before], square, value.dtype, 1
    )
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
    none = pointwise.constant(own.shape[dim] - 1, "i32")
    # Of NaNs, which equal nothing, the first is the extreme one.
    same = "{0} == {1} || is_nan({0})" if own.dtype == "f32" else "{0} == {1}"
    here = pointwise.fuse(schedule, same, [own, extreme], own.shape, "bool", 2)
    candidates = pointwise.fuse(
        schedule, "select({1}, {0}, {2})", [place, none, here], own.shape, "i32", 1
    )
    return reduce(schedule, candidates, FOLDS["amin", "i32"], [dim], keepdim=keepdim)
