"""The error of a float32 matrix product, and the largest error that rounding explains.

The bound is derived in docs/numerics.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

FLUSHED = 2.0**-126  # the smallest normal float32: a GPU may round smaller numbers to zero
FLOAT64_ROUNDOFF = sys.float_info.epsilon / 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The error of a product at its worst element: the one with the largest error / bound.

    `element` is its index in C order, and `bound` the largest |error| that rounding explains
    there. If elements are not finite, `element` is the first of them, and `error` is nan.
    """

    finite: bool
    element: int
    error: float
    bound: float

    @property
    def explained(self) -> bool:
        """True if rounding explains every element's error."""
        return self.finite and self.error <= self.bound


def gamma(length: int, unit_roundoff: float) -> float:
    """Return the largest error of a sum of `length` products, relative to the sum of |products|.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1 and (3.5).
    """
    return length * unit_roundoff / (1 - length * unit_roundoff)


def bound(a: Tensor, b: Tensor, *, unit_roundoff: float) -> Tensor:
    """Return the largest |float32 product - float64 product| that rounding explains.

    Holds for every order of summation, with or without fused multiply-add, and on devices that
    flush subnormal numbers. float32 [m, k], [k, n] -> float64 [m, n].
    """
    size_a, size_b = a.double().abs(), b.double().abs()
    length = a.shape[1]
    relative = gamma(length, unit_roundoff) + gamma(length, FLOAT64_ROUNDOFF)
    underflow = 2 * length + size_a.sum(1, keepdim=True) + size_b.sum(0, keepdim=True)
    return relative * (size_a @ size_b) + 2 * FLUSHED * underflow


def compare(result: Tensor, a: Tensor, b: Tensor, *, unit_roundoff: float) -> Comparison:
    """Compare `result` with the float64 product of `a` and `b`: float32 [m, n], [m, k], [k, n]."""
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
