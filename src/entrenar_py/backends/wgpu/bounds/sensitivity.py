"""First-order bounds on the error of a whole training step's gradients.

Intervals (`bounds`) hold for every element and every kink, but they forget that errors cancel what
they came from: after some layers they hold nothing. Here each operation's own error is weighed by
its exact effect on the result, which float64's derivative of the graph gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.backends.wgpu import bounds
from entrenar_py.backends.wgpu.bounds import intervals, rules

# Second-order terms, and that an operand which is off may round the other way.
SAFETY = 2.0


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One output of a device against float64: the L1 norm of its error and what explains it.

    `size` is the L1 norm of the output, `num_elements` how many it has. `element`, in C order, is
    the one that is furthest off, by `element_error`, of which rounding explains `element_bound`.
    """

    output: int
    error: float
    bound: float
    size: float
    num_elements: int
    element: int
    element_error: float
    element_bound: float

    @property
    def explained(self) -> bool:
        """True if rounding explains the output, and the element that is furthest off."""
        return self.error <= self.bound and self.element_error <= self.element_bound


def deviations(
    outputs: Sequence[Tensor], graph: GraphModule, inputs: Sequence[Tensor]
) -> list[Deviation]:
    """Compare each output of a device with its largest error to first order.

    The L1 norm of an output's error is its product with the error's own signs s. To first order
    the error of s . output is the sum, over all operations, of what the operation itself is off
    by, times the derivative of s . output by its result (Linnainmaa 1976): each at most its bound
    times the derivative's absolute value. Comparisons are taken to come out as in float64.
    The same with a single element in the place of s . output bounds that element.
    Raises UsageError as `bounds.bound` does.
    """
    walk = _Local(graph)
    given = [bounds.given(one.detach()) for one in inputs]
    exact = walk.run(*given)
    return [
        _deviation(index, got.detach().double(), one.value, walk)
        for index, (got, one) in enumerate(zip(outputs, exact, strict=True))
    ]


def _deviation(index: int, got: Tensor, exact: Tensor, walk: _Local) -> Deviation:
    difference = (got - exact.detach()).nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf)
    element = int(difference.abs().argmax())
    only = torch.zeros_like(difference)
    only.view(-1)[element] = 1.0
    signs = torch.where(difference < 0, -1.0, 1.0).double()
    bound = _explained(exact, signs, walk)
    return Deviation(
        output=index,
        error=float(difference.abs().sum()),
        bound=bound,
        size=float(exact.detach().abs().sum()),
        num_elements=exact.numel(),
        element=element,
        element_error=float(difference.abs().max()),
        element_bound=_explained(exact, only, walk) if exact.numel() > 1 else bound,
    )


def _explained(exact: Tensor, weights: Tensor, walk: _Local) -> float:
    """Return the largest error of weights . exact: each operation's error times its effect."""
    if not exact.requires_grad:
        return 0.0
    effects = torch.autograd.grad(
        exact, walk.results, weights, retain_graph=True, allow_unused=True
    )
    return SAFETY * sum(
        _weighed(effect, error)
        for effect, error in zip(effects, walk.errors, strict=True)
        if effect is not None
    )


def _weighed(effect: Tensor, error: Tensor) -> float:
    """Return the sum of |effect| * error; an infinite error without effect counts as nothing."""
    total = float(torch.linalg.vecdot(effect.abs().reshape(-1), error.reshape(-1)))
    if math.isfinite(total):
        return total
    return float(torch.where(effect == 0, 0.0, effect.abs() * error).nan_to_num(torch.inf).sum())


class _Local(bounds.Walk):
    """The graph in float64, and what each operation is off by if its operands are exact."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.results: list[Tensor] = []
        self.errors: list[Tensor] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> intervals.Bounded:
        """The same, without what its operands are off by."""
        with torch.no_grad():  # operands have no interval of their own here
            one = super().call_function(target, args, kwargs)
        if not one.value.is_floating_point():
            return intervals.Bounded(one.value, one.value, one.value)
        value = rules.evaluate(target, args, kwargs, lambda one: one.value)
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        error = one.error
        if bool((error > 0).any()):
            # An operand that is off may make inexact what is exact here, by one rounding.
            size = value.detach().abs().nan_to_num(posinf=0.0)  # what is infinite is so exactly
            self.errors.append(error + intervals.UNIT * size)
            self.results.append(value)
        return intervals.Bounded(value, value.detach(), value.detach())
