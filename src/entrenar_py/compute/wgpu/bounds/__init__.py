"""Bounds on the error of a float32 device, for every output of a captured graph.

`bound` computes three numbers for each element: its value in float64, and the smallest and the
largest float32 that a conforming device may hold. If the intervals of a comparison's operands
overlap, the comparison is undecided, and values that depend on it cover both outcomes.
`intervals` has the arithmetic, `rules` a rule for each operation, `accuracies` the accuracy of each
function in WGSL, `chains` what a device may make of sums and products by computing them in another
order. `sensitivity` has first-order bounds for whole steps, for which intervals grow too
wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from entrenar_py.compute.wgpu.bounds import chains, intervals, rules
from entrenar_py.compute.wgpu.bounds.intervals import Bounded
from entrenar_py.shared.errors import UsageError


def bound(graph: GraphModule, inputs: Sequence[Tensor]) -> list[Bounded]:
    """Return the bounds of every output of `graph` for these inputs, float32, integer or bool.

    Raises UsageError for an operation without a rule in `rules`, and for an integer operand that
    rounding leaves undecided.
    """
    with torch.no_grad():
        return list(Walk(graph).run(*(given(one.detach()) for one in inputs)))


class Walk(Interpreter):
    """Runs a graph on `Bounded` values."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._chains = chains.Chains()

    def run_node(self, n: Node) -> Any:
        """Run node `n`; UsageError, with its operation and line, if the result has no bound."""
        if n.op == "call_function":
            result = n.meta["val"]
            dtypes = {one.dtype for one in pytree.tree_leaves(result)}
            if not isinstance(result, Tensor) or dtypes & {torch.float64, torch.float16}:
                raise _unknown(n)
            self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Bounded:
        """Return a constant of the graph."""
        return given(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Bounded:
        """Return the value and the interval of one operation's result."""
        is_float = self._node.meta["val"].is_floating_point()
        value = rules.evaluate(target, args, kwargs, lambda one: one.value)
        operands = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Bounded)]
        if not is_float and all(rules.is_exact(one) for one in operands):
            return Bounded(value, value, value)
        if target not in rules.RULES:
            raise _unknown(self._node)
        interval = rules.RULES[target](target, args, kwargs)
        interval = self._chains.reordered(self._node, interval, operands)
        shape = value.shape
        return Bounded(value, interval.low.expand(shape), interval.high.expand(shape))


def given(tensor: Tensor) -> Bounded:
    """Return the bounds of an input or a constant: itself, and also zero where subnormal."""
    if not tensor.is_floating_point():
        return Bounded(tensor, tensor, tensor)
    interval = intervals.exactly(tensor.double())
    return Bounded(tensor.double(), interval.low, interval.high)


def _unknown(node: Node) -> UsageError:
    known = ", ".join(sorted(str(one).removeprefix("aten.") for one in rules.RULES))
    return UsageError(
        f"{node.target} at {node.meta.get('line', '')}: no bound on its error is known "
        f"for {node.meta['val']}; known are {known}"
    )
