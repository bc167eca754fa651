"""A captured graph: what its nodes say, and passes that take out what no kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from entrenar_py.shared.errors import UsageError

DTYPES = {torch.float32: "f32", torch.int64: "i32", torch.int32: "i32", torch.bool: "bool"}

# Only in memory: what is computed with them is a float32 or an i32.
STORED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.uint8: "u8"}
LOADED = {"bf16": "f32", "f16": "f32", "u8": "i32"}

# torch uses these dtypes for small indices that are only compared, which i32 can hold. For
# arithmetic, i32 can't replace them: they wrap around at other values.
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_COUNTING = frozenset({"arange", "unsqueeze", "view", "expand"})


def name_of(node: Node) -> str:
    if node.op != "call_function":
        return node.op
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def line_of(node: Node) -> str:
    return str(node.meta.get("line", "a line outside of the model"))


def shape_of(node: Node) -> tuple[int, ...]:
    shape = tuple(int(size) for size in node.meta["val"].shape)
    if 0 in shape:
        raise UsageError(
            f"{node.target} at {line_of(node)}: shape={list(shape)} has no elements; backend wgpu "
            "needs sizes of at least 1"
        )
    return shape


def stored_dtype_of(node: Node) -> str:
    """Return the dtype in memory of a tensor that the graph is given."""
    return STORED.get(node.meta["val"].dtype) or dtype_of(node)


def dtype_of(node: Node) -> str:
    dtype = node.meta["val"].dtype
    if dtype in _NARROW and name_of(node) in _COUNTING:
        return "i32"
    if dtype not in DTYPES:
        raise UsageError(
            f"{node.target} at {line_of(node)}: dtype={dtype}; backend wgpu computes in "
            f"{', '.join(str(one) for one in DTYPES)}: cast it, or use another backend"
        )
    return DTYPES[dtype]


# Computes on the host the values that depend on no input, such as positions, masks and sines.
#
# They are the same in every step, and the host is more accurate: a device's sine may be off by
# 2^-11.

_ATEN = torch.ops.aten

# Operations that result in one number where they have nothing to add up, and that number.
_NEUTRAL: dict[Any, float | bool] = {
    _ATEN.any.default: False,
    _ATEN.any.dim: False,
    _ATEN.bmm.default: 0,
    _ATEN.mm.default: 0,
    _ATEN.prod.default: 1,
    _ATEN.prod.dim_int: 1,
    _ATEN.sum.default: 0,
    _ATEN.sum.dim_IntList: 0,
}
# Operations that lay other tensors over their first operand, and leave it alone if these are empty.
_OVERLAYS = frozenset(
    {
        _ATEN.index_put.default,
        _ATEN.scatter.src,
        _ATEN.scatter.value,
        _ATEN.scatter_add.default,
        _ATEN.slice_scatter.default,
    }
)


def is_empty(node: Node) -> bool:
    """Return whether the result of `node` is a tensor without elements."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 0


def drop_empties(graph: GraphModule) -> None:
    """Replace operations that read tensors without elements by ones that read none.

    Afterwards only results of the graph have no elements, and what they are made of.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_empty(node):
            continue
        if not any(is_empty(operand) for operand in node.all_input_nodes):
            continue
        if node.target is _ATEN.cat.default:
            rest = [operand for operand in node.args[0] if not is_empty(operand)]
            node.args = (rest, *node.args[1:])
        elif node.target in _OVERLAYS and not is_empty(node.args[0]):
            node.replace_all_uses_with(node.args[0])
        elif (value := _repeated(node)) is not None:
            _fill(graph, node, value)
    graph.graph.eliminate_dead_code()


def _repeated(node: Node) -> float | bool | None:
    """Return the number that all elements of the result are; None if they differ."""
    if node.target is _ATEN.constant_pad_nd.default:
        return node.args[2] if len(node.args) > 2 else 0  # type: ignore[return-value]
    return _NEUTRAL.get(node.target)


def _fill(graph: GraphModule, node: Node, value: float | bool) -> None:
    result = node.meta["val"]
    full: Callable[..., Tensor] = _ATEN.full.default
    with graph.graph.inserting_before(node):
        filled = graph.graph.call_function(
            full, (list(result.shape), value), {"dtype": result.dtype, "pin_memory": False}
        )
    filled.meta.update(node.meta)
    node.replace_all_uses_with(filled)


# The device computes larger values itself, in less time than an upload would take.
NUM_ELEMENTS_MAX = 2**18

# Operations that are free on the device: they repeat one number, or only change indices.
_FREE = frozenset(
    {
        _ATEN.alias.default,
        _ATEN.clone.default,
        _ATEN.expand.default,
        _ATEN.full.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.squeeze.dims,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
    }
)


def fold_constants(graph: GraphModule) -> None:
    """Replace operations on constants alone by constants named `_table<i>`."""
    known: dict[Node, Tensor] = {}
    computed: dict[Node, None] = {}  # in order
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        elif _is_constant(node, known):
            known[node] = _value(node, known)
            if node.target not in _FREE or any(one in computed for one in node.all_input_nodes):
                computed[node] = None
    needed = [one for one in computed if any(user not in computed for user in one.users)]
    for index, node in enumerate(needed):
        _replace(graph, node, f"_table{index}", known[node])
    graph.graph.eliminate_dead_code()


def _is_constant(node: Node, known: dict[Node, Tensor]) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and all(one in known for one in node.all_input_nodes)
        and isinstance(value, Tensor)
        and value.numel() <= NUM_ELEMENTS_MAX
    )


def _value(node: Node, known: dict[Node, Tensor]) -> Tensor:
    def take(one: Any) -> Any:
        return torch.fx.node.map_arg(one, lambda operand: known[operand])

    with torch.no_grad():
        result: Tensor = node.target(*take(node.args), **take(node.kwargs))  # type: ignore[operator]
    return result


def _replace(graph: GraphModule, node: Node, name: str, value: Tensor) -> None:
    graph.register_buffer(name, value.contiguous())
    with graph.graph.inserting_before(node):
        table = graph.graph.get_attr(name)
    table.meta.update(node.meta)
    node.replace_all_uses_with(table)
