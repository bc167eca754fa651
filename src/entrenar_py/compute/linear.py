"""A linear layer that computes its products on a device, and the check of a product's operands.

Autograd sees only CPU tensors, so backward runs in the calling thread on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entrenar_py.compute import Pair
from entrenar_py.shared.errors import UsageError

Products = Callable[[Sequence[Pair]], list[Tensor]]


def apply(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`: [..., in], [out, in], [out] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _Linear.apply(products, rows, weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        result = result + bias
    return result.reshape(*x.shape[:-1], weight.shape[0])


def check_operands(a: Tensor, b: Tensor, *, backend: str) -> None:
    """Raise UsageError unless `a @ b` is a non-empty float32 product of matrices on the CPU."""
    product = f"product of {list(a.shape)} and {list(b.shape)} on backend {backend}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(f"{product}: use two matrices [m, k] and [k, n]")
    if not (a.numel() and b.numel()):
        raise UsageError(f"{product}: nothing to multiply; use sizes of at least 1")
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != torch.float32 or operand.device.type != "cpu":
            raise UsageError(
                f"{product}: {name} is {operand.dtype} on {operand.device}; use float32 on cpu"
            )


class _Linear(torch.autograd.Function):
    """`rows @ weight.T`: [batch, in], [out, in] -> [batch, out]."""

    @staticmethod
    def forward(ctx: Any, products: Products, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(rows, weight)
        return products([(rows, weight.t())])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        """Compute the needed gradients, of `rows`, `weight` or both, by one call of `products`."""
        rows, weight = ctx.saved_tensors
        _, wants_rows, wants_weight = ctx.needs_input_grad
        pairs = []
        if wants_rows:
            pairs.append((gradient, weight))
        if wants_weight:
            pairs.append((gradient.t(), rows))
        results = iter(ctx.products(pairs))
        return None, next(results) if wants_rows else None, next(results) if wants_weight else None
