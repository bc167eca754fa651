"""Compares a device's outputs with the bounds on their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu.bounds import bound
from entrenar_py.compute.wgpu.bounds.intervals import Bounded


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The error and the bound of an output at its worst element, with the largest error / bound.

    `element` is its index in C order. `num_bounded` of the `num_elements` have a finite bound.
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
