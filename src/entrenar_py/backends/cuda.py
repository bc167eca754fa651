"""One NVIDIA GPU through torch, in true float32: no TF32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entrenar_py.backends import Pair, linear
from entrenar_py.backends.operands import check_operands
from entrenar_py.errors import BackendUnavailable


@dataclass(frozen=True)
class CudaBackend:
    """See `Backend`. Runs on torch's current CUDA device; `device` is its name."""

    device: str
    name: str = "cuda"
    software: bool = False
    unit_roundoff: float = 2.0**-24

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Three products on the GPU; the bias is added on the CPU."""
        return linear.apply(self.products, x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """torch's own product on the GPU."""
        check_operands(a, b, backend=self.name)
        return (a.detach().cuda() @ b.detach().cuda()).cpu()

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """One product after the other."""
        return [self.matmul(a, b) for a, b in pairs]


def open_cuda() -> CudaBackend:
    """The current CUDA device. Turns TF32 off for the whole process: it rounds operands to 11 bits.

    Raises BackendUnavailable with torch's own words.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_name()
    except (AssertionError, RuntimeError) as error:  # a build without CUDA asserts
        raise BackendUnavailable(f"backend cuda: {error}") from error
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return CudaBackend(device)
