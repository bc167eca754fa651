"""Intervals of the float32 values that a device may hold instead of an exact value.

The result of an operation on intervals contains the result of every conforming device. Devices may
round up or down, add in any order, contract `a * b + c`, and flush subnormal numbers. Endpoints are
float32 numbers, stored as float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from entrenar_py.compute.products import FLOAT64_ROUNDOFF, FLUSHED

# WGSL, "Differences from IEEE-754": an implementation may round up or down.
UNIT = 2.0**-23
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Interval:
    """The values from `low` to `high` that a device may hold, float64 or bool.

    [-inf, inf] means that nothing is known; the value may even be NaN.
    """

    low: Tensor
    high: Tensor

    @property
    def size(self) -> Tensor:
        """The largest absolute value in the interval."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `total` for one term: low, high, size, count (0.0 if zero, else 1.0)."""
        return self.low, self.high, self.size, (self.size > 0).double()

    @property
    def decided(self) -> Tensor:
        """True where the interval is a single value."""
        return self.low == self.high


@dataclass(frozen=True)
class Bounded:
    """A `value`, and the bounds `low` and `high` of a device's values; all have the same shape.

    Floats are float64. Integers and bools keep their dtype.
    """

    value: Tensor
    low: Tensor
    high: Tensor

    @property
    def interval(self) -> Interval:
        return Interval(self.low, self.high)

    @property
    def error(self) -> Tensor:
        """The largest distance of the interval's ends from `value`, float64; inf if unknown."""
        low, value, high = self.low.double(), self.value.double(), self.high.double()
        distance = torch.maximum(high - value, value - low)
        distance = torch.where(low == high, (value - low).nan_to_num(0.0), distance)
        return distance.nan_to_num(torch.inf, posinf=torch.inf)


def exactly(x: Tensor) -> Interval:
    """Return the interval of an exact `x`; it includes zero if `x` is subnormal."""
    return flush(Interval(x, x))


def rounded(low: Tensor, high: Tensor) -> Interval:
    """Return the interval of a correctly rounded operation with exact results in [low, high].

    In WGSL `x + y`, `x - y` and `x * y` are correctly rounded, up or down. A result that is a
    float32 number is exact.
    """
    below, above = low.float(), high.float()
    infinity = torch.tensor(torch.inf)
    below = torch.where(below.double() > low, torch.nextafter(below, -infinity), below)
    above = torch.where(above.double() < high, torch.nextafter(above, infinity), above)
    return flush(_known(below.double(), above.double()))


def within(low: Tensor, high: Tensor) -> Interval:
    """Return the float32 numbers in [low, high]; the ends already include rounding errors."""
    low, high = low.clamp(max=_LARGEST), high.clamp(min=-_LARGEST)  # overflow may round to these
    above, below = low.float(), high.float()
    infinity = torch.tensor(torch.inf)
    above = torch.where(above.double() < low, torch.nextafter(above, infinity), above)
    rounded_up = (below.double() > high) & (high <= _LARGEST)
    below = torch.where(rounded_up, torch.nextafter(below, -infinity), below)
    above = torch.where(low < -_LARGEST, -infinity, above)
    below = torch.where(high > _LARGEST, infinity, below)
    # Never return an empty interval: without a float32 number in [low, high], return these ends.
    empty = above > below
    low, high = torch.where(empty, low, above.double()), torch.where(empty, high, below.double())
    return flush(_known(low, high))


def near(
    low: Tensor, high: Tensor, *, relative: Tensor | float, absolute: Tensor | float
) -> Interval:
    """Return [low, high] widened at each end by a relative and an absolute error."""
    return within(low - _slack(low, relative, absolute), high + _slack(high, relative, absolute))


def _slack(x: Tensor, relative: Tensor | float, absolute: Tensor | float) -> Tensor:
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    # A subnormal number has the same ULP as the smallest normal number.
    floor = torch.where((size > 0) & (size < FLUSHED), FLUSHED, size)
    return floor * (torch.as_tensor(relative) + 4 * FLOAT64_ROUNDOFF) + absolute


def flush(interval: Interval) -> Interval:
    """Extend subnormal ends to zero: WGSL lets devices flush inputs and outputs of operations."""
    if not interval.low.is_floating_point():
        return interval
    low = torch.where((interval.low > 0) & (interval.low < FLUSHED), 0.0, interval.low)
    high = torch.where((interval.high < 0) & (interval.high > -FLUSHED), 0.0, interval.high)
    return Interval(low, high)


def _known(low: Tensor, high: Tensor) -> Interval:
    """Return [low, high], or [-inf, inf] where an end is NaN."""
    unknown = low.isnan() | high.isnan()
    return Interval(low.masked_fill(unknown, -torch.inf), high.masked_fill(unknown, torch.inf))


def hull(*corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elementwise minimum and maximum of `corners`; NaN where one is NaN."""
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def add(a: Interval, b: Interval) -> Interval:
    """Return the interval of a + b, which WGSL rounds correctly."""
    return rounded(_sum_below(a.low, b.low), -_sum_below(-a.high, -b.high))


def _sum_below(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b in float64, rounded down (Knuth's TwoSum finds sums that were rounded up)."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    return torch.where(error < 0, torch.nextafter(total, torch.full_like(total, -torch.inf)), total)


def negate(a: Interval) -> Interval:
    """Return the interval of -a, which is exact."""
    return Interval(-a.high, -a.low)


def multiply(a: Interval, b: Interval) -> Interval:
    """Return the interval of a * b, which WGSL rounds correctly; float64 has it exactly."""
    return rounded(*hull(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high))


def square(a: Interval) -> Interval:
    """Return the interval of a * a, which is never negative."""
    low, high = hull(a.low * a.low, a.high * a.high)
    return rounded(torch.where((a.low <= 0) & (a.high >= 0), 0.0, low), high)


def divide(a: Interval, b: Interval) -> Interval:
    """Return the interval of a / b: 2.5 ULP in WGSL for |b| in [2^-126, 2^126].

    A larger b may give 0, because 1 / b may be flushed.
    """
    low, high = hull(a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high)
    crosses = (b.low <= 0) & (b.high >= 0)
    low = torch.where(crosses, torch.nan, low)
    large = b.size > 2.0**126
    low = torch.where(large, low.clamp(max=0), low)
    high = torch.where(large, high.clamp(min=0), high)
    return near(low, high, relative=2.5 * UNIT, absolute=0.0)


def gamma(count: Tensor) -> Tensor:
    """Return the largest relative error of k = `count` roundings (Higham, section 3.1)."""
    unit = UNIT + 2 * FLOAT64_ROUNDOFF
    product = count.clamp(min=0) * unit
    return torch.where(product < 1, product / (1 - product), torch.inf)


def total(low: Tensor, high: Tensor, size: Tensor, count: Tensor) -> Interval:
    """Return the interval of sums with exact values in [low, high], added in any order.

    `size` is the sum of the terms' absolute values, `count` the number of terms that aren't exactly
    zero. A term goes through at most count - 1 additions (Higham, section 4.2). Each of them may
    flush up to 2^-126.
    """
    error = gamma(count - 1) * size
    error = error + torch.where(size > 0, 4 * FLOAT64_ROUNDOFF * count * size, 0.0)
    small = (size > 0) & (size < FLUSHED / UNIT)  # for larger sums, gamma covers it
    error = error + torch.where(small, count * FLUSHED, 0.0)
    return within(low - error, high + error)


def sum_over(a: Interval, dims: Sequence[int], *, keepdim: bool) -> Interval:
    """Return the interval of the sum along `dims`, or along all dims if empty."""
    dims = list(dims) or list(range(a.low.ndim))
    if not dims:
        return a
    return total(*(one.sum(dims, keepdim=keepdim) for one in a.terms))


def matmul(a: Interval, b: Interval) -> Interval:
    """Return the interval of [..., m, k] @ [..., k, n], for any order of sums (Higham, eq. 3.5)."""
    middle_a, radius_a = _middle(a)
    middle_b, radius_b = _middle(b)
    middle = middle_a @ middle_b
    radius = middle_a.abs() @ radius_b + radius_a @ (middle_b.abs() + radius_b)
    size = a.size @ b.size
    count = (a.size > 0).double() @ (b.size > 0).double()
    # Each product and each partial sum may be flushed, with an error of 2^-126.
    error = gamma(count) * size + 4 * FLOAT64_ROUNDOFF * count * size + 2 * FLUSHED * count
    error = radius + torch.where(count > 0, error, 0.0)
    return within(middle - error, middle + error)


def _middle(a: Interval) -> tuple[Tensor, Tensor]:
    middle = (a.low + a.high) / 2
    return middle, torch.where(a.decided, 0.0, (a.high - a.low) / 2 + middle.abs() * 2.0**-52)
