"""Sums of sums and products of products, which a device may compute in any order.

WGSL allows it ("Reassociation and fusion"): `a * (b * 3.0)` may be computed as `(a * b) * 3.0`,
which Mesa's compiler does. The exact result is the same, and each order rounds as often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from entrenar_py.compute.wgpu.bounds import intervals, rules
from entrenar_py.compute.wgpu.bounds.intervals import Bounded, Interval

_ATEN = torch.ops.aten
_SUMS = (_ATEN.add.Tensor, _ATEN.sub.Tensor)
_PRODUCTS = (_ATEN.mul.Tensor, _ATEN.pow.Tensor_Scalar)
_POWER_MAX = 8  # a larger one is computed by WGSL's pow
_MOVES = (  # they change no size, and kernels read through them
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

    `_terms` has for a sum the number of its terms and the sum of their absolute values. `_factors`
    has for a product the number of its multiplications.
    """

    _terms: dict[Node, tuple[int, Tensor]] = field(default_factory=dict)
    _factors: dict[Node, int] = field(default_factory=dict)

    def reordered(self, node: Node, interval: Interval, operands: Sequence[Bounded]) -> Interval:
        """Return the interval of `node` widened by what another order of its chain makes of it.

        A single sum or product has one order. Of three terms or more, each goes through all
        additions but one at most (Higham, section 4.2).
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
        for one in node.args[:2]:
            if isinstance(one, Node):
                held = next(bounded)
                known = self._terms.get(one, (1, _size(held)))
            else:
                known = 1, torch.tensor(abs(float(one)), dtype=torch.float64)  # type: ignore[arg-type]
            count, size = count + known[0], size + known[1]
        self._terms[node] = count, size
        if count < 3:
            return interval
        error = intervals.gamma(torch.tensor(count - 1.0, dtype=torch.float64)) * size
        return intervals.within(interval.low - error, interval.high + error)


def _size(held: Bounded) -> Tensor:
    """Return the largest absolute value of each element."""
    return torch.maximum(held.low.double().abs(), held.high.double().abs())


def _value(held: Bounded) -> Tensor:
    return held.value


def _nodes(node: Node) -> list[Node]:
    return [one for one in node.args if isinstance(one, Node)]
