"""Computes on the host the values that depend on no input, such as positions, masks and sines.

They are the same in every step, and the host is more accurate: a device's sine may be off by 2^-11.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

# The device computes larger values itself, in less time than an upload would take.
NUM_ELEMENTS_MAX = 2**18

_ATEN = torch.ops.aten
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


def fold(graph: GraphModule) -> None:
    """Replace operations whose operands are all constants by constants named `_table<i>`."""
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
