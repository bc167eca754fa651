"""Lowers a graph of core ATen operations to dispatches of kernels.

An operation without a kernel is refused with the line of the model's source that uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu import pointwise, values
from entrenar_py.compute.wgpu.emitter import BITS, Buffer, Coding
from entrenar_py.compute.wgpu.graph import (
    DTYPES,
    LOADED,
    dtype_of,
    is_empty,
    line_of,
    name_of,
    shape_of,
    stored_dtype_of,
)
from entrenar_py.compute.wgpu.operations import FUSING, OPERATIONS, VIEWS
from entrenar_py.compute.wgpu.tiles import Limits
from entrenar_py.compute.wgpu.values import CHEAP, COST_MAX, Schedule, Step, Stored, Value
from entrenar_py.shared.errors import UsageError

REGION_MAX = 12  # operations to look ahead for one that all uses of a value lead to


@dataclass(frozen=True)
class Result:
    """An output of the graph: elements of `buffer` from `offset` on, in C order.

    The buffer of one without elements is None.
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
    """Lower `graph` to dispatches. Without `fused`, each operation but a view has its own dispatch.

    Equal operations in `graph` are merged in place.
    Raises UsageError, with the model's source line, for operations and dtypes without a kernel.
    """
    _merge_equals(graph)
    return _Lowering(graph, Schedule(limits, bindings_max), fused).run()


class _Lowering:
    """Makes the values of a graph's nodes, in order."""

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
                raise UsageError(_refusal(node))  # another overload, such as view.dtype
            if result.dtype in LOADED and name not in VIEWS:
                dtype_of(node)  # refuses to compute with it
            self._settle(node, name, result)
        return result

    def _lower(self, name: str, node: Node, args: Any, kwargs: Any) -> Any:
        if name in OPERATIONS:
            return OPERATIONS[name](self.schedule, node, *args, **kwargs)
        if name in pointwise.SCALARS:
            return pointwise.apply(self.schedule, name, args, shape_of(node), dtype_of(node))
        return None

    def _settle(self, node: Node, name: str, value: Value) -> None:
        """Store a value that is too expensive for each of its users to compute again."""
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
        """Return whether all uses of `node` lead to one operation, through few others that fuse."""
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
    """Count the operations that use each node, directly or through views."""
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
