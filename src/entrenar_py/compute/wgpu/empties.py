"""Takes tensors without elements out of a captured graph. A device has no memory of size 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_ATEN = torch.ops.aten

# Operations whose result is one number where they have nothing to add up, and that number.
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


def drop(graph: GraphModule) -> None:
    """Replace operations that read tensors without elements by ones that read none.

    Afterwards only results of the graph have no elements, and what they are made of.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_empty(node):
            continue
        if not any(is_empty(one) for one in node.all_input_nodes):
            continue
        if node.target is _ATEN.cat.default:
            rest = [one for one in node.args[0] if not is_empty(one)]
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
    made = node.meta["val"]
    full: Callable[..., Tensor] = _ATEN.full.default
    with graph.graph.inserting_before(node):
        filled = graph.graph.call_function(
            full, (list(made.shape), value), {"dtype": made.dtype, "pin_memory": False}
        )
    filled.meta.update(node.meta)
    node.replace_all_uses_with(filled)
