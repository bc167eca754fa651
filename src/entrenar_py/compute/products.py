"""Matrix products on a device: a layer that computes them, and a bound on the rounding error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entrenar_py.compute import Pair
from entrenar_py.shared.errors import UsageError

# The error of a float32 matrix product, and the largest error that rounding can cause.
#
# The bound is derived in docs/numerics.md.

FLUSHED = 2.0**-126  # the smallest normal float32; a GPU may flush smaller numbers to zero
FLOAT64_ROUNDOFF = sys.float_info.epsilon / 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The error of a product at its worst element, with the largest ratio of error to bound.

    `element` is the index in C order, and `bound` the largest |error| that rounding can cause
    there. If elements are not finite, `element` is the first of these, and `error` is nan.
    """

    finite: bool
    element: int
    error: float
    bound: float

    @property
    def explained(self) -> bool:
        """True if rounding can explain the error of every element."""
        return self.finite and self.error <= self.bound


def gamma(length: int, unit_roundoff: float) -> float:
    """Return the largest error of a sum of `length` products, relative to the sum of |products|.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1 and (3.5).
    """
    return length * unit_roundoff / (1 - length * unit_roundoff)


def bound(a: Tensor, b: Tensor, *, unit_roundoff: float) -> Tensor:
    """Return the largest |float32 product - float64 product| that rounding can cause.

    Holds for every order of summation, with or without fused multiply-add, and on devices that
    flush subnormal numbers. float32 [m, k], [k, n] -> float64 [m, n].
    """
    size_a, size_b = a.double().abs(), b.double().abs()
    length = a.shape[1]
    relative = gamma(length, unit_roundoff) + gamma(length, FLOAT64_ROUNDOFF)
    underflow = 2 * length + size_a.sum(1, keepdim=True) + size_b.sum(0, keepdim=True)
    return relative * (size_a @ size_b) + 2 * FLUSHED * underflow


def compare(result: Tensor, a: Tensor, b: Tensor, *, unit_roundoff: float) -> Comparison:
    """Compare `result` [m, n] with the float64 product of `a` [m, k] and `b` [k, n]."""
    allowed = bound(a, b, unit_roundoff=unit_roundoff).reshape(-1)
    finite = torch.isfinite(result).reshape(-1)
    if not finite.all():
        first = int((~finite).int().argmax())
        return Comparison(
            finite=False, element=first, error=float("nan"), bound=float(allowed[first])
        )
    errors = (result.double() - a.double() @ b.double()).abs().reshape(-1)
    worst = int((errors / allowed).argmax())
    return Comparison(
        finite=True, element=worst, error=float(errors[worst]), bound=float(allowed[worst])
    )


# A linear layer that computes its products on a device, and the check of a product's operands.
#
# Autograd sees only CPU tensors, so backward runs in the calling thread on every backend.

Products = Callable[[Sequence[Pair]], list[Tensor]]


def apply(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`: [..., in], [out, in], [out] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    result: Tensor = _Linear.apply(products, rows, weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        result = result + bias
    return result.reshape(*x.shape[:-1], weight.shape[0])


def check_operands(a: Tensor, b: Tensor, *, backend: str) -> None:
    """Raise UsageError if `a @ b` isn't a non-empty float32 product of matrices on the CPU."""
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
        """Return the needed gradients, of `rows`, `weight` or both, from one call of `products`."""
        rows, weight = ctx.saved_tensors
        _, wants_rows, wants_weight = ctx.needs_input_grad
        pairs = []
        if wants_rows:
            pairs.append((gradient, weight))
        if wants_weight:
            pairs.append((gradient.t(), rows))
        results = iter(ctx.products(pairs))
        return None, next(results) if wants_rows else None, next(results) if wants_weight else None
