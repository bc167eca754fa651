"""Each kind of core ATen operation as a value: which function makes it, from its own arguments.

Every function is (schedule, node, the operation's arguments) -> value, or None for arguments that
no kernel serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import Node

from entrenar_py.backends.wgpu import indexing, pointwise, reductions, views
from entrenar_py.backends.wgpu.emitter import Emitter
from entrenar_py.backends.wgpu.index import Indices
from entrenar_py.backends.wgpu.nodes import dtype_of, shape_of
from entrenar_py.backends.wgpu.values import Operands, Schedule, Value


def _same(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    return pointwise.cast(schedule, value, dtype_of(node))


def _reshape(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    return views.reshape(schedule, value, shape_of(node))


def _permute(schedule: Schedule, node: Node, value: Value, dims: Sequence[int]) -> Value:
    return views.permute(schedule, value, dims)


def _expand(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    return views.expand(schedule, value, shape_of(node))


def _repeat(schedule: Schedule, node: Node, value: Value, times: Sequence[int]) -> Value:
    return views.repeat(schedule, value, times)


def _slice(
    schedule: Schedule,
    node: Node,
    value: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim %= len(value.shape)
    first, _, _ = slice(start, end, step).indices(value.shape[dim])
    return views.take(schedule, value, dim, first, shape_of(node)[dim], step)


def _select(schedule: Schedule, node: Node, value: Value, dim: int, index: int) -> Value:
    dim %= len(value.shape)
    one = views.take(schedule, value, dim, index % value.shape[dim], 1, 1)
    return views.reshape(schedule, one, shape_of(node))


def _add(
    schedule: Schedule, node: Node, a: Any, b: Any, *, alpha: float = 1, name: str = "add"
) -> Value | None:
    if alpha != 1:
        shape = b.shape if isinstance(b, Value) else ()
        b = pointwise.apply(schedule, "mul", [b, alpha], shape, dtype_of(node))
    return pointwise.apply(schedule, name, [a, b], shape_of(node), dtype_of(node))


def _divide(
    schedule: Schedule, node: Node, a: Any, b: Any, *, rounding_mode: str | None = None
) -> Value | None:
    name = {None: "div", "floor": "div_floor", "trunc": "div_trunc"}[rounding_mode]
    return pointwise.apply(schedule, name, [a, b], shape_of(node), dtype_of(node))


def _clamp(schedule: Schedule, node: Node, x: Any, low: Any = None, high: Any = None) -> Any:
    shape, dtype = shape_of(node), dtype_of(node)
    for name, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            x = pointwise.apply(schedule, name, [x, limit], shape, dtype)
    return x


def _where(schedule: Schedule, node: Node, condition: Any, a: Any, b: Any) -> Value | None:
    return pointwise.apply(schedule, "where", [a, b, condition], shape_of(node), dtype_of(node))


def _full(schedule: Schedule, node: Node, *args: Any, **_: Any) -> Value:
    return pointwise.constant(args[1], dtype_of(node), shape_of(node))


def _arange(schedule: Schedule, node: Node, *args: Any, **_: Any) -> Value:
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    return pointwise.counting(start, step, shape_of(node), 0, dtype_of(node))


def _fold(
    name: str,
    schedule: Schedule,
    node: Node,
    x: Value,
    dims: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> Value | None:
    """sum, prod, amax, amin, any along the dims that the operation names."""
    dtype = "bool" if name == "any" else dtype_of(node)
    fold = reductions.FOLDS.get((name, dtype))
    if fold is None:
        return None
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    inner = pointwise.cast(schedule, x, dtype)
    return reductions.reduce(schedule, inner, fold, listed, keepdim=keepdim)


def _extreme(
    name: str,
    schedule: Schedule,
    node: Node,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
) -> Any:
    """max and min: of all, or along one dim, values and where they stand."""
    if dim is None:
        return _fold(name, schedule, node, x)
    schedule.realise(x)
    fold = reductions.FOLDS[name, x.dtype]
    return (
        schedule.realise(reductions.reduce(schedule, x, fold, [dim], keepdim=keepdim)),
        reductions.arg_extreme(schedule, x, name, dim, keepdim=keepdim),
    )


def _place_of(
    name: str,
    schedule: Schedule,
    node: Node,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
) -> Value:
    return reductions.arg_extreme(schedule, x, name, dim, keepdim=keepdim)


def _cumsum(schedule: Schedule, node: Node, x: Value, dim: int, **_: Any) -> Value:
    return reductions.cumulative_sum(schedule, pointwise.cast(schedule, x, dtype_of(node)), dim)


def _multiply(schedule: Schedule, node: Node, a: Value, b: Value) -> Value:
    """mm and bmm: stored operands, the product itself pending."""
    for one in (a, b):
        schedule.strided(one)
    operands = Operands(a.shape[:-2], a, b)

    def read(emitter: Emitter, indices: Indices) -> str:
        assert emitter.product is operands, "a product is read by its own epilogue"
        return "acc"

    return Value(shape_of(node), "f32", read, cost=1, product=operands)


# By the part of aten's name before the dot; pointwise.SCALARS has the rest.
VIEWS: dict[str, Callable[..., Value]] = {
    "clone": _same,
    "view": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "permute": _permute,
    "expand": _expand,
    "repeat": _repeat,
    "slice": _slice,
    "select": _select,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **VIEWS,
    "_to_copy": _same,
    "add": _add,
    "sub": partial(_add, name="sub"),
    "div": _divide,
    "clamp": _clamp,
    "where": _where,
    "full": _full,
    "arange": _arange,
    **{name: partial(_fold, name) for name in ("sum", "prod", "amax", "amin", "any")},
    "max": partial(_extreme, "amax"),
    "min": partial(_extreme, "amin"),
    "argmax": partial(_place_of, "amax"),
    "argmin": partial(_place_of, "amin"),
    "cumsum": _cumsum,
    "mm": _multiply,
    "bmm": _multiply,
    "embedding": indexing.embedding,
    "index": indexing.index,
    "index_select": indexing.index_select,
    "index_put": indexing.index_put,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter_add": indexing.scatter,
    "cat": indexing.cat,
    "constant_pad_nd": indexing.pad,
    "slice_scatter": indexing.slice_scatter,
}
# What becomes part of its users' kernels, if its shape allows.
FUSING = frozenset(pointwise.SCALARS) | {
    *("clone", "_to_copy", "clamp", "expand", "unsqueeze", "squeeze", "sum", "amax", "amin")
}
