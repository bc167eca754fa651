"""The lowering of a graph of core ATen operations to dispatches of kernels.

An operation without a kernel is refused; the error names the line of the model's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from entrenar_py.compute import draws
from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu import lookups, pointwise, values
from entrenar_py.compute.wgpu.capture import (
    DTYPES,
    LOADED,
    dtype_of,
    is_empty,
    line_of,
    name_of,
    shape_of,
    stored_dtype_of,
)
from entrenar_py.compute.wgpu.emitter import BITS, NF4, Buffer, Coding, Emitter
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.tiles import Limits
from entrenar_py.compute.wgpu.values import CHEAP, COST_MAX, Operands, Schedule, Step, Stored, Value
from entrenar_py.shared.errors import UsageError


def _cast(schedule: Schedule, node: Node, value: Value, *_: Any, **__: Any) -> Value:
    dtype = dtype_of(node)
    if value.dtype in LOADED:  # the type that a load gives
        value = replace(value, dtype=LOADED[value.dtype], view=None)
    return pointwise.cast(schedule, value, dtype)


def _nf4(
    schedule: Schedule, node: Node, codes: Value, scales: Value, second: Value, *_: Any
) -> Value | None:
    """Lower `compute.nf4.decode`: elements of the matrix are decoded where they are loaded."""
    stored = [schedule.contiguous(part) for part in (codes, scales, second)]
    if any(part.offset for part in stored):
        return None  # a view of a part of a matrix
    coding = Coding(NF4, tuple(part.buffer for part in stored[1:]))
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
    by_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype == "bool" for index in by_dim.values()):
        return None  # the result's size would depend on data
    dims = sorted(by_dim)
    together = dims == list(range(dims[0], dims[-1] + 1))
    common = np.broadcast_shapes(*(index.shape for index in by_dim.values()))
    spread = {dim: values.expand(schedule, index, common) for dim, index in by_dim.items()}
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
    tensors = [index for index in indices if index is not None]
    if len(tensors) < len(indices) or (accumulate and x.dtype != "f32"):
        return None
    if any(index.dtype == "bool" for index in tensors):
        return _masked_put(schedule, x, tensors, rows) if not accumulate else None
    ids = lookups.flatten_index(schedule, x.shape[: len(tensors)], tensors)
    width = math.prod(x.shape[len(tensors) :])
    whole = values.reshape(schedule, x, [x.size // width, width])
    looked = np.broadcast_shapes(*(index.shape for index in tensors))
    added = values.expand(schedule, rows, (*looked, *x.shape[len(tensors) :]))
    added = values.reshape(schedule, added, [ids.size, width])
    if accumulate:
        return values.reshape(schedule, lookups.add_rows(schedule, whole, ids, added), x.shape)
    wide = values.expand(schedule, values.reshape(schedule, ids, [ids.size, 1]), [ids.size, width])
    put = lookups.scatter(schedule, whole, 0, wide, added, add=False)
    return values.reshape(schedule, put, x.shape)


def _masked_put(schedule: Schedule, x: Value, masks: list[Value], number: Value) -> Value | None:
    """Return `x` with `number` where the one mask, over the first dims of `x`, is true."""
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
        return None  # `reduce=...`, which has no kernel
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
    """Lower `draws.kept`. Each user draws again, which is cheaper than storing the draws."""
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
# Operations that are fused into their users' kernels if the shapes allow that.
FUSING = frozenset(pointwise.SCALARS) | {
    *("clone", "_to_copy", "clamp", "expand", "unsqueeze", "squeeze", "sum", "amax", "amin")
}


REGION_MAX = 12  # the most operations that `_converges` follows


@dataclass(frozen=True)
class Result:
    """An output of the graph: elements of `buffer` from `offset` on, in C order.

    `buffer` is None for an output without elements.
    """

    buffer: Buffer | None
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Lowered:
    """A graph as dispatches, in order. `inputs` are the buffers of its placeholders."""

    steps: tuple[Step, ...]
    inputs: tuple[Buffer, ...]
    constants: tuple[tuple[Buffer, torch.Tensor], ...]
    results: tuple[Result, ...]


def lower(graph: GraphModule, limits: Limits, *, bindings_max: int, fused: bool = True) -> Lowered:
    """Return `graph` as dispatches. Without `fused`, each operation except views has its own.

    Equal operations in `graph` are merged in place.
    Raises UsageError, with the model's source line, for operations and dtypes without a kernel.
    """
    _merge_equals(graph)
    return _Lowering(graph, Schedule(limits, bindings_max), fused).run()


class _Lowering:
    """The lowering of one graph: creates the values of its nodes, in order."""

    def __init__(self, graph: GraphModule, schedule: Schedule, fused: bool) -> None:
        self.schedule = schedule
        self._graph = graph
        self._fused = fused
        self._values: dict[Node, Value | tuple[Value, ...]] = {}
        self._uses = _uses(graph)
        self._order = {node: number for number, node in enumerate(graph.graph.nodes)}

    def run(self) -> Lowered:
        inputs: list[Buffer] = []
        constants: list[tuple[Buffer, torch.Tensor]] = []
        results: tuple[Result, ...] = ()
        for node in self._graph.graph.nodes:
            self.schedule.line = line_of(node)
            if node.op == "placeholder":
                inputs.append(self._given(node, f"input{len(inputs)}"))
            elif node.op == "get_attr":
                buffer = self._given(node, f"constant{len(constants)}")
                constants.append((buffer, getattr(self._graph, str(node.target))))
            elif node.op == "output":
                results = self._results(node)
            elif self._uses[node] and not is_empty(node):
                self._values[node] = self._call(node)
        return Lowered(tuple(self.schedule.steps), tuple(inputs), tuple(constants), results)

    def _given(self, node: Node, name: str) -> Buffer:
        shape, dtype = tuple(node.meta["val"].shape), stored_dtype_of(node)
        buffer = Buffer(name, dtype, math.prod(shape))
        coding = Coding(dtype) if dtype in BITS else None
        stored = Stored(buffer, at.strides_of(shape), coding=coding)
        self._values[node] = values.stored_value(shape, dtype, stored)
        return buffer

    def _results(self, node: Node) -> tuple[Result, ...]:
        results = []
        for output in node.args[0]:  # type: ignore[union-attr]
            if is_empty(output):  # type: ignore[arg-type]
                empty = output.meta["val"]  # type: ignore[union-attr]
                results.append(Result(None, 0, tuple(empty.shape), empty.dtype))
                continue
            value = self._values[output]  # type: ignore[index]
            assert isinstance(value, Value)
            self.schedule.line = line_of(output)  # type: ignore[arg-type]
            stored = self.schedule.contiguous(value)
            dtype = output.meta["val"].dtype  # type: ignore[union-attr]
            results.append(Result(stored.buffer, stored.offset, value.shape, dtype))
        return tuple(results)

    def _call(self, node: Node) -> Any:
        name = name_of(node)
        if name == "getitem":
            source, position = node.args
            result = self._values[source]  # type: ignore[index]
            assert isinstance(result, tuple)
            assert isinstance(position, int)
            return result[position]
        if any(map(is_empty, node.all_input_nodes)):
            raise UsageError(_refusal(node))
        value_of: Any = self._values.__getitem__
        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        try:
            result = self._lower(name, node, args, kwargs)
        except OverflowError as error:
            raise UsageError(
                f"{node.target} at {line_of(node)}: {error}; use smaller numbers"
            ) from error
        if result is None:
            raise UsageError(_refusal(node))
        if isinstance(result, Value):
            assert result.shape == shape_of(node), f"{node.target}: {result.shape}"
            if result.dtype != DTYPES.get(node.meta["val"].dtype, result.dtype):
                raise UsageError(_refusal(node))  # a different overload, such as view.dtype
            if result.dtype in LOADED and name not in VIEWS:
                dtype_of(node)  # raises for a dtype that kernels can't compute with
            self._settle(node, name, result)
        return result

    def _lower(self, name: str, node: Node, args: Any, kwargs: Any) -> Any:
        if name in OPERATIONS:
            return OPERATIONS[name](self.schedule, node, *args, **kwargs)
        if name in pointwise.SCALARS:
            return pointwise.apply(self.schedule, name, args, shape_of(node), dtype_of(node))
        return None

    def _settle(self, node: Node, name: str, value: Value) -> None:
        """Store a value that is too expensive to be computed again by each user."""
        if name in VIEWS or value.stored is not None:
            return
        if not self._fused or (self._uses[node] > 1 and not self._may_stay(node, value)):
            self.schedule.realise(value)

    def _may_stay(self, node: Node, value: Value) -> bool:
        """Return whether computing a value again is cheap, or its users fuse into one kernel."""
        if not value.pending and value.cost <= CHEAP and len(value.reads) <= 1:
            return True
        fits = value.product is None and value.cost <= COST_MAX // 2
        return fits and self._converges(node)

    def _converges(self, node: Node) -> bool:
        """Return whether all uses of `node` soon reach one operation, through fusible ones."""
        ahead = {user for user in node.users if self._uses[user]}
        for _ in range(REGION_MAX):
            first = min(ahead, key=self._order.__getitem__)
            if name_of(first) not in FUSING:
                return False
            if len(ahead) == 1:
                return True
            ahead.remove(first)
            ahead |= {user for user in first.users if self._uses[user]}
        return False


def _merge_equals(graph: GraphModule) -> None:
    """Merge nodes that are the same operation on the same operands."""
    known: dict[tuple[Any, str, str], Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        # Compared by repr, since 1, 1.0 and True are equal. The repr of a node is its unique name.
        first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


def _uses(graph: GraphModule) -> dict[Node, int]:
    uses: dict[Node, int] = {}
    for node in reversed(graph.graph.nodes):
        uses[node] = 1 if node.op == "output" else 0
        for user in node.users:
            uses[node] += uses[user] if name_of(user) in VIEWS else min(1, uses[user])
    return uses


def _refusal(node: Node) -> str:
    operands = []
    for arg in node.args:
        value = arg.meta.get("val") if isinstance(arg, Node) else None
        operands.append(f"{value.dtype} {list(value.shape)}" if value is not None else str(arg))
    return (
        f"{node.target} at {line_of(node)}: backend wgpu has no kernel for it with "
        f"{', '.join(operands) or 'nothing'}; write it with other operations, or use another "
        "backend"
    )
