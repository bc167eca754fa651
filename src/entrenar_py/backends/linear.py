"""A linear layer whose three products run on a device: autograd on the CPU around them.

Autograd sees CPU tensors only, so backward runs in the calling thread on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entrenar_py.backends import Pair

Products = Callable[[Sequence[Pair]], list[Tensor]]


def apply(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: [..., in], [out, in], [out] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _Linear.apply(products, rows, weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        result = result + bias
    return result.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """rows [batch, in], weight [out, in] -> [batch, out]."""

    @staticmethod
    def forward(ctx: Any, products: Products, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(rows, weight)
        return products([(rows, weight.t())])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        """Gradients of `rows` and `weight`: as many products as needed, one submission."""
        rows, weight = ctx.saved_tensors
        _, wants_rows, wants_weight = ctx.needs_input_grad
        pairs = []
        if wants_rows:
            pairs.append((gradient, weight))
        if wants_weight:
            pairs.append((gradient.t(), rows))
        results = iter(ctx.products(pairs))
        return None, next(results) if wants_rows else None, next(results) if wants_weight else None
