"""First-order bounds on the error of a whole training step's gradients.

Each operation's own error is weighted by its effect on the result, a derivative of the graph in
float64. Intervals (`bounds`) are rigorous, but ignore correlations between errors, so they are too
wide to be useful after some layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu import bounds
from entrenar_py.compute.wgpu.bounds import intervals, rules

# Allows for second-order terms, and for errors of operands that change how a result rounds.
SAFETY = 2.0


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The error of one output of a device, and the largest error that rounding can cause.

    `error` and `bound` are L1 norms over the output, `size` is the output's L1 norm. `element` is
    the index, in C order, of the element with the largest error. `element_error` is this element's
    error, and `element_bound` the largest error that rounding can cause there.
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
        """True if rounding can explain the error of the whole output and of `element`."""
        return self.error <= self.bound and self.element_error <= self.element_bound


def deviations(
    outputs: Sequence[Tensor], graph: GraphModule, inputs: Sequence[Tensor]
) -> list[Deviation]:
    """Return each device output's error against float64, with a first-order bound.

    With s the signs of an output's error, the error's L1 norm is the error of s . output. To first
    order that is a sum over all operations: the operation's own error, times the derivative of
    s . output with respect to its result (Linnainmaa 1976). Each term is at most the operation's
    bound times the derivative's absolute value. The bound of a single element follows in the same
    way. Comparisons are assumed to have the same results as in float64.
    Raises UsageError as `bounds.bound` does.
    """
    walk = _Local(graph)
    bounded = [bounds.given(tensor.detach()) for tensor in inputs]
    exact = walk.run(*bounded)
    return [
        _deviation(index, got.detach().double(), tensor.value, walk)
        for index, (got, tensor) in enumerate(zip(outputs, exact, strict=True))
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
    """Return a bound on the error of weights . exact: the sum of all errors times their effects."""
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
    """Return the sum of |effect| * error, in which 0 * inf is 0."""
    total = float(torch.linalg.vecdot(effect.abs().reshape(-1), error.reshape(-1)))
    if math.isfinite(total):
        return total
    return float(torch.where(effect == 0, 0.0, effect.abs() * error).nan_to_num(torch.inf).sum())


class _Local(bounds.Walk):
    """Runs a graph in float64, and bounds each operation's own error for exact operands."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.results: list[Tensor] = []
        self.errors: list[Tensor] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> intervals.Bounded:
        """Return the exact result, and append the error of this operation to `errors`."""
        with torch.no_grad():  # only for the error; `value` below carries gradients
            result = super().call_function(target, args, kwargs)
        if not result.value.is_floating_point():
            return intervals.Bounded(result.value, result.value, result.value)
        value = rules.evaluate(target, args, kwargs, lambda one: one.value)
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        error = result.error
        if bool((error > 0).any()):
            # With inexact operands, a result that is exact here may be rounded.
            size = value.detach().abs().nan_to_num(posinf=0.0)  # an infinite result is exact
            self.errors.append(error + intervals.UNIT * size)
            self.results.append(value)
        return intervals.Bounded(value, value.detach(), value.detach())
