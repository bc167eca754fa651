"""The CPU through torch: the slow and simple reference for the other backends."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute import Pair
from entrenar_py.compute.linear import check_operands
from entrenar_py.compute.steps import Model, Stepper


@dataclass(frozen=True)
class CpuBackend:
    """See `Backend`. `device` names the architecture and the widest vector unit torch uses."""

    device: str
    name: str = "cpu"
    software: bool = False
    unit_roundoff: float = 2.0**-24

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that calls `workload.gradients`."""
        return lambda ids, drop: workload.gradients(tensors, ids, drop=drop, scale=scale)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Call `torch.nn.functional.linear`."""
        return F.linear(x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply with torch's `@`."""
        check_operands(a, b, backend=self.name)
        return a.detach() @ b.detach()

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Compute the products one after another."""
        return [self.matmul(a, b) for a, b in pairs]


def open_cpu() -> CpuBackend:
    """Return the CPU backend, which every machine has."""
    return CpuBackend(f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}")
