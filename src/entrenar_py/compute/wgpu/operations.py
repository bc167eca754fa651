"""The functions that lower core ATen operations to values, in the table `OPERATIONS`.

Each is (schedule, node, the operation's arguments) -> value, or None for arguments that no kernel
supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch.fx import Node

from entrenar_py.compute import draws
from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu import lookups, pointwise, values
from entrenar_py.compute.wgpu.emitter import NF4, Coding, Emitter
from entrenar_py.compute.wgpu.graph import LOADED, dtype_of, name_of, shape_of
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.values import CHEAP, Operands, Schedule, Stored, Value


def _cast(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    dtype = dtype_of(node)
    if value.dtype in LOADED:  # what a load of it gives
        value = replace(value, dtype=LOADED[value.dtype], view=None)
    return pointwise.cast(schedule, value, dtype)


def _nf4(
    schedule: Schedule, node: Node, codes: Value, scales: Value, second: Value, *_: Any
) -> Value | None:
    """Lower `backends.nf4.decode`: the matrix is decoded wherever an element of it is loaded."""
    stored = [schedule.contiguous(one) for one in (codes, scales, second)]
    if any(one.offset for one in stored):
        return None  # a part of a matrix
    coding = Coding(NF4, tuple(one.buffer for one in stored[1:]))
    shape = shape_of(node)
    matrix = Stored(stored[0].buffer, at.strides_of(shape), coding=coding)
    return values.stored_value(shape, dtype_of(node), matrix)


def _reshape(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    return values.reshape(schedule, value, shape_of(node))


def _expand(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    return values.expand(schedule, value, shape_of(node))


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
    return values.take(schedule, value, dim, first, shape_of(node)[dim], step)


def _select(schedule: Schedule, node: Node, value: Value, dim: int, index: int) -> Value:
    dim %= len(value.shape)
    one = values.take(schedule, value, dim, index % value.shape[dim], 1, 1)
    return values.reshape(schedule, one, shape_of(node))


def _unfold(schedule: Schedule, node: Node, value: Value, dim: int, size: int, step: int) -> Value:
    return values.unfold(schedule, value, dim % len(value.shape), size, step)


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
    """Lower sum, prod, amax, amin, any."""
    dtype = "bool" if name == "any" else dtype_of(node)
    fold = pointwise.FOLDS.get((name, dtype))
    if fold is None:
        return None
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    inner = pointwise.cast(schedule, x, dtype)
    return pointwise.reduce(schedule, inner, fold, listed, keepdim=keepdim)


def _extreme(
    name: str,
    schedule: Schedule,
    node: Node,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
) -> Any:
    """Lower max and min: of all elements, or along one dim as (values, indices)."""
    if dim is None:
        return _fold(name, schedule, node, x)
    schedule.realise(x)
    fold = pointwise.FOLDS[name, x.dtype]
    return (
        schedule.realise(pointwise.reduce(schedule, x, fold, [dim], keepdim=keepdim)),
        pointwise.arg_extreme(schedule, x, name, dim, keepdim=keepdim),
    )


def _place_of(
    name: str,
    schedule: Schedule,
    node: Node,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
) -> Value:
    return pointwise.arg_extreme(schedule, x, name, dim, keepdim=keepdim)


def _cumsum(schedule: Schedule, node: Node, x: Value, dim: int, **_: Any) -> Value:
    return pointwise.cumulative_sum(schedule, pointwise.cast(schedule, x, dtype_of(node)), dim)


def _multiply(schedule: Schedule, node: Node, a: Value, b: Value) -> Value:
    """Lower mm and bmm. The operands are stored, and the product is pending."""
    for one in (a, b):
        schedule.strided(one)
    operands = Operands(a.shape[:-2], a, b)

    def read(emitter: Emitter, indices: Indices) -> str:
        assert emitter.product is operands, "a product is read by its own epilogue"
        return "acc"

    return Value(shape_of(node), "f32", read, cost=1, product=operands)


def _embedding(schedule: Schedule, node: Node, table: Value, ids: Value, *_: Any) -> Value:
    return lookups.look_up(schedule, table, {0: ids}, shape_of(node), 0)


def _index_select(schedule: Schedule, node: Node, x: Value, dim: int, ids: Value) -> Value:
    dim %= len(x.shape)
    return lookups.look_up(schedule, x, {dim: ids}, shape_of(node), dim)


def _index(schedule: Schedule, node: Node, x: Value, indices: list[Value | None]) -> Value | None:
    by_dim = {dim: one for dim, one in enumerate(indices) if one is not None}
    if any(one.dtype == "bool" for one in by_dim.values()):
        return None  # the result's size would depend on data
    dims = sorted(by_dim)
    together = dims == list(range(dims[0], dims[-1] + 1))
    common = np.broadcast_shapes(*(one.shape for one in by_dim.values()))
    spread = {dim: values.expand(schedule, one, common) for dim, one in by_dim.items()}
    first = dims[0] if together else 0
    return lookups.look_up(schedule, x, spread, shape_of(node), first, wraps=True)


def _gather(schedule: Schedule, node: Node, x: Value, dim: int, ids: Value, **_: Any) -> Value:
    return lookups.gather(schedule, x, dim, ids)


def _index_put(
    schedule: Schedule,
    node: Node,
    x: Value,
    indices: list[Value | None],
    rows: Value,
    accumulate: bool = False,
    *_: Any,
) -> Value | None:
    tensors = [one for one in indices if one is not None]
    if len(tensors) < len(indices) or (accumulate and x.dtype != "f32"):
        return None
    if any(one.dtype == "bool" for one in tensors):
        return _masked_put(schedule, x, tensors, rows) if not accumulate else None
    ids = lookups.flatten_index(schedule, x.shape[: len(tensors)], tensors)
    width = math.prod(x.shape[len(tensors) :])
    whole = values.reshape(schedule, x, [x.size // width, width])
    looked = np.broadcast_shapes(*(one.shape for one in tensors))
    added = values.expand(schedule, rows, (*looked, *x.shape[len(tensors) :]))
    added = values.reshape(schedule, added, [ids.size, width])
    if accumulate:
        return values.reshape(schedule, lookups.add_rows(schedule, whole, ids, added), x.shape)
    wide = values.expand(schedule, values.reshape(schedule, ids, [ids.size, 1]), [ids.size, width])
    put = lookups.scatter(schedule, whole, 0, wide, added, add=False)
    return values.reshape(schedule, put, x.shape)


def _masked_put(schedule: Schedule, x: Value, masks: list[Value], number: Value) -> Value | None:
    """Return `x` with one number where a mask of its first dims is true."""
    mask = masks[0]
    if len(masks) > 1 or number.size != 1 or mask.shape != x.shape[: len(mask.shape)]:
        return None
    shape = (*mask.shape, *(1 for _ in x.shape[len(mask.shape) :]))
    spread = values.expand(schedule, values.reshape(schedule, mask, shape), x.shape)
    number = values.expand(schedule, values.reshape(schedule, number, ()), x.shape)
    return pointwise.where(schedule, spread, number, x)


def _scatter(
    schedule: Schedule, node: Node, x: Value, dim: int, ids: Value, source: Any, **kwargs: Any
) -> Value | None:
    if kwargs:
        return None  # a reduction that is not a sum
    if isinstance(source, Value):
        for d, size in enumerate(ids.shape):
            source = values.take(schedule, source, d, 0, size, 1)
    else:
        source = pointwise.constant(source, x.dtype, ids.shape)
    dim %= max(1, len(x.shape))
    # A shorter index is padded with -1, which selects no element.
    short = [0 if d == dim else size - ids.shape[d] for d, size in enumerate(x.shape)]
    widths = [width for one in reversed(short) for width in (0, one)]
    ids, source = (lookups.pad(schedule, one, widths, -1) for one in (ids, source))
    return lookups.scatter(schedule, x, dim, ids, source, add=name_of(node) == "scatter_add")


def _cat(schedule: Schedule, node: Node, values: list[Value], dim: int = 0) -> Value:
    dtype = dtype_of(node)
    return lookups.join(schedule, [pointwise.cast(schedule, one, dtype) for one in values], dim)


def _slice_scatter(
    schedule: Schedule,
    node: Node,
    x: Value,
    source: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim %= len(x.shape)
    first, _, _ = slice(start, end, step).indices(x.shape[dim])
    return lookups.overlay(schedule, x, source, dim, first, step)


def _kept(
    schedule: Schedule, node: Node, key: Value, draw: int, shape: list[int], share: float
) -> Value:
    """Lower `draws.kept`. Each user draws again, which costs less than memory for the draws."""
    schedule.realise(key)
    strides = at.strides_of(shape)
    shift, least = 32 - draws.USED_BITS, draws.threshold(share)

    def read(emitter: Emitter, indices: Indices) -> str:
        key_words = [key.read(emitter, (Index(number),)) for number in (0, 1)]
        element = emitter.number(at.place(indices, strides), "i32")
        bits = f"random_bits({{0}}, {{1}}, {draw}u, {{2}})"
        return emitter.op(f"({bits} >> {shift}u) >= {least}u", *key_words, element)

    return Value(tuple(shape), "bool", read, key.reads, CHEAP)


# Keys are the parts of aten's names before the dot. Other operations are in pointwise.SCALARS.
VIEWS: dict[str, Callable[..., Value]] = {
    "clone": _cast,
    "view": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "permute": lambda schedule, node, value, dims: values.permute(schedule, value, dims),
    "expand": _expand,
    "repeat": lambda schedule, node, value, times: values.repeat(schedule, value, times),
    "slice": _slice,
    "select": _select,
    "unfold": _unfold,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **VIEWS,
    "_to_copy": _cast,
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
    "nf4": _nf4,
    "bmm": _multiply,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "index_put": _index_put,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "cat": _cat,
    "constant_pad_nd": lambda schedule, node, value, *args: lookups.pad(schedule, value, *args),
    "slice_scatter": _slice_scatter,
    "kept": _kept,
}
# Operations that join their users' kernels if the shapes allow it.
FUSING = frozenset(pointwise.SCALARS) | {
    *("clone", "_to_copy", "clamp", "expand", "unsqueeze", "squeeze", "sum", "amax", "amin")
}
