"""Bounds on the error of a float32 device, for every output of a captured graph.

The graph is walked with three numbers an element: its value in float64, and the smallest and the
largest float32 that a conforming device may hold. `intervals` has the arithmetic of such pairs,
`rules` one rule for each operation, `accuracies` what WGSL says of each function, `sensitivity` a
first-order bound for whole steps, where intervals grow too wide. A comparison whose operands
overlap is undecided; a value that depends on it has both outcomes in its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from entrenar_py.backends.wgpu.bounds import intervals, rules
from entrenar_py.backends.wgpu.bounds.intervals import Bounded
from entrenar_py.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One output of a device against its bounds, at the element that uses up most of its bound.

    `element` is its index in C order; `num_bounded` says how many of `num_elements` have a bound.
    """

    output: int
    element: int
    got: float
    value: float
    low: float
    high: float
    num_elements: int
    num_bounded: int

    @property
    def explained(self) -> bool:
        """True if rounding explains every element."""
        return self.low <= self.got <= self.high or not self.num_bounded


def bound(graph: GraphModule, inputs: Sequence[Tensor]) -> list[Bounded]:
    """The bounds of every output of `graph` for these inputs, float32 or whole numbers.

    Raises UsageError for an operation whose accuracy is not known here, and for one that needs a
    whole number or a truth value that rounding leaves undecided.
    """
    with torch.no_grad():
        return list(Walk(graph).run(*(given(one.detach()) for one in inputs)))


def agrees(
    outputs: Sequence[Tensor], graph: GraphModule, inputs: Sequence[Tensor]
) -> list[Agreement]:
    """Compare each output of a device with its bounds."""
    bounded = bound(graph, inputs)
    assert len(bounded) == len(outputs), "as many outputs as the graph has"
    return [
        _compare(index, got, one)
        for index, (got, one) in enumerate(zip(outputs, bounded, strict=True))
    ]


def _compare(index: int, got: Tensor, allowed: Bounded) -> Agreement:
    found = got.detach().double().reshape(-1)
    low, high, value, error = (
        one.double().reshape(-1)
        for one in (allowed.low, allowed.high, allowed.value, allowed.error)
    )
    assert found.shape == value.shape, f"output {index}: {list(got.shape)}"
    known = ~error.isposinf()
    inside = (low <= found) & (found <= high)
    used = torch.where(inside, (found - value).abs() / error.clamp(min=1e-300), torch.inf)
    used = torch.where(known, used.nan_to_num(0.0, posinf=torch.inf), -1.0)
    worst = int(used.argmax()) if len(used) else 0
    at = [float(one[worst]) if len(used) else 0.0 for one in (found, value, low, high)]
    return Agreement(
        output=index,
        element=worst,
        **dict(zip(("got", "value", "low", "high"), at, strict=True)),
        num_elements=len(used),
        num_bounded=int(known.sum()),
    )


class Walk(Interpreter):
    """Each node's `Bounded`."""

    def run_node(self, n: Node) -> Any:
        """Refuses by operation and line."""
        if n.op == "call_function":
            result = n.meta["val"]
            dtypes = {one.dtype for one in pytree.tree_leaves(result)}
            if not isinstance(result, Tensor) or dtypes & {torch.float64, torch.float16}:
                raise _unknown(n)
            self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Bounded:
        """A constant."""
        return given(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Bounded:
        """Value and interval of one operation."""
        is_float = self._node.meta["val"].is_floating_point()
        value = rules.evaluate(target, args, kwargs, lambda one: one.value)
        operands = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Bounded)]
        if not is_float and all(rules.is_exact(one) for one in operands):
            return Bounded(value, value, value)
        if target not in rules.RULES:
            raise _unknown(self._node)
        interval = rules.RULES[target](target, args, kwargs)
        shape = value.shape
        return Bounded(value, interval.low.expand(shape), interval.high.expand(shape))


def given(tensor: Tensor) -> Bounded:
    """An input or a constant: exact, unless a device flushes it."""
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
