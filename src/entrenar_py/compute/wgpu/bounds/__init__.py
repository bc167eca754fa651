"""Bounds on the error of a float32 device, for every output of a captured graph.

`bound` computes three numbers for each element: its value in float64, and the smallest and the
largest float32 that a conforming device may hold. If the intervals of a comparison's operands
overlap, the comparison is undecided, and values that depend on it cover both outcomes. `intervals`
has the arithmetic, `rules` a rule for each operation and the accuracy of each function in WGSL.
`Chains` covers sums and products that a device computes in a different order. `sensitivity` has
first-order bounds for whole steps, for which intervals become too wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from entrenar_py.compute.wgpu.bounds import intervals, rules
from entrenar_py.compute.wgpu.bounds.intervals import Bounded, Interval
from entrenar_py.shared.errors import UsageError

# Chains of sums or products, which a device may compute in any order.
#
# WGSL allows it ("Reassociation and fusion"): `a * (b * 3.0)` may be computed as `(a * b) * 3.0`,
# which Mesa's compiler does. The exact result is the same, and the number of roundings, too.

_ATEN = torch.ops.aten
_SUMS = (_ATEN.add.Tensor, _ATEN.sub.Tensor)
_PRODUCTS = (_ATEN.mul.Tensor, _ATEN.pow.Tensor_Scalar)
_POWER_MAX = 8  # larger exponents are computed by WGSL's pow
_MOVES = (  # they change no absolute value, and kernels read through them
    _ATEN.neg.default,
    _ATEN.clone.default,
    _ATEN.expand.default,
    _ATEN.permute.default,
    _ATEN.slice.Tensor,
    _ATEN.squeeze.dim,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.unfold.default,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
)


@dataclass
class Chains:
    """The terms and factors of the sums and products of one graph, by node.

    `_terms` has, for each sum, the number of its terms and the sum of their absolute values.
    `_factors` has, for each product, the number of its multiplications.
    """

    _terms: dict[Node, tuple[int, Tensor]] = field(default_factory=dict)
    _factors: dict[Node, int] = field(default_factory=dict)

    def reordered(self, node: Node, interval: Interval, operands: Sequence[Bounded]) -> Interval:
        """Return the interval of `node`, widened for every possible order of its chain.

        A single sum or product has only one order. With three or more terms, each term goes through
        at most all additions but one (Higham, section 4.2).
        """
        if node.target in _MOVES:
            self._move(node)
        elif node.meta["val"].is_floating_point():
            if node.target in _PRODUCTS:
                return self._product(node, interval)
            if node.target in _SUMS and not node.kwargs:
                return self._sum(node, interval, operands)
        return interval

    def _move(self, node: Node) -> None:
        moved, *rest = node.args
        assert isinstance(moved, Node), "operations of a graph are on its nodes"
        if moved in self._factors:
            self._factors[node] = self._factors[moved]
        if moved in self._terms:
            count, size = self._terms[moved]
            size = size.expand(moved.meta["val"].shape)
            if node.target is _ATEN.view.default:
                size = size.reshape(node.meta["val"].shape)
            elif node.target not in (_ATEN.neg.default, _ATEN.clone.default):
                size = rules.evaluate(node.target, (size, *rest), node.kwargs, _value)
            self._terms[node] = count, size

    def _product(self, node: Node, interval: Interval) -> Interval:
        before = sum(self._factors.get(one, 0) for one in _nodes(node))
        number = before + 1
        if node.target is _ATEN.pow.Tensor_Scalar:
            exponent = node.args[1]
            if not isinstance(exponent, int | float) or exponent not in range(2, _POWER_MAX + 1):
                return interval
            number, before = int(exponent) * (before + 1) - 1, before + int(exponent) - 2
        self._factors[node] = number
        if not before:
            return interval
        return intervals.near(
            interval.low, interval.high, relative=number * intervals.UNIT, absolute=0.0
        )

    def _sum(self, node: Node, interval: Interval, operands: Sequence[Bounded]) -> Interval:
        bounded = iter(operands)
        count, size = 0, torch.zeros((), dtype=torch.float64)
        for operand in node.args[:2]:
            if isinstance(operand, Node):
                held = next(bounded)
                known = self._terms.get(operand, (1, _size(held)))
            else:
                known = 1, torch.tensor(abs(float(operand)), dtype=torch.float64)  # type: ignore[arg-type]
            count, size = count + known[0], size + known[1]
        self._terms[node] = count, size
        if count < 3:
            return interval
        error = intervals.gamma(torch.tensor(count - 1.0, dtype=torch.float64)) * size
        return intervals.within(interval.low - error, interval.high + error)


def _size(held: Bounded) -> Tensor:
    return torch.maximum(held.low.double().abs(), held.high.double().abs())


def _value(held: Bounded) -> Tensor:
    return held.value


def _nodes(node: Node) -> list[Node]:
    return [one for one in node.args if isinstance(one, Node)]


def bound(graph: GraphModule, inputs: Sequence[Tensor]) -> list[Bounded]:
    """Return the bounds of every output of `graph` for these inputs, float32, integer or bool.

    Raises UsageError for an operation without a rule in `rules`, and for an integer operand with a
    value that depends on rounding.
    """
    with torch.no_grad():
        return list(Walk(graph).run(*(given(one.detach()) for one in inputs)))


class Walk(Interpreter):
    """Runs a graph on `Bounded` values."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self._chains = Chains()

    def run_node(self, n: Node) -> Any:
        """Return the result of node `n`.

        Raises UsageError, with the operation and its line, if its result has a dtype without
        bounds.
        """
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
    """Return the bounds of an input or a constant: its value, extended to zero where subnormal."""
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
