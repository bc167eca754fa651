"""The error of a float32 matrix product, and the largest one that rounding explains.

The bound is derived in docs/numerics.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

FLUSHED = 2.0**-126  # the smallest normal float32: what is below may become zero on a GPU
FLOAT64_ROUNDOFF = sys.float_info.epsilon / 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A product against float64, at the element that uses up the largest part of its bound.

    `element` is its index in C order; the first non-finite one if there is any, and then `error`
    is nan. `bound` is the largest |error| that rounding explains there.
    """

    finite: bool
    element: int
    error: float
    bound: float

    @property
    def explained(self) -> bool:
        """True if rounding explains every element."""
        return self.finite and self.error <= self.bound


def gamma(length: int, unit_roundoff: float) -> float:
    """The largest relative error of a sum of `length` products: k u / (1 - k u).

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1 and (3.5).
    """
    return length * unit_roundoff / (1 - length * unit_roundoff)


def bound(a: Tensor, b: Tensor, *, unit_roundoff: float) -> Tensor:
    """The largest |float32 product - float64 product| that rounding explains, float64 [m, n].

    Holds for every order of summation, with or without fused multiply-add, and on devices that
    flush subnormal numbers. float32 [m, k], [k, n].
    """
    size_a, size_b = a.double().abs(), b.double().abs()
    length = a.shape[1]
    relative = gamma(length, unit_roundoff) + gamma(length, FLOAT64_ROUNDOFF)
    underflow = 2 * length + size_a.sum(1, keepdim=True) + size_b.sum(0, keepdim=True)
    return relative * (size_a @ size_b) + 2 * FLUSHED * underflow


def compare(result: Tensor, a: Tensor, b: Tensor, *, unit_roundoff: float) -> Comparison:
    """`result` against the float64 product of `a` and `b`. float32 [m, n], [m, k], [k, n]."""
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
