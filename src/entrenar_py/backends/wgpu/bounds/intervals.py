"""Intervals of the float32 values that a device may hold where exact arithmetic has one value.

An operation on intervals gives one that holds the result of every conforming device, whichever way
it rounds, in whatever order it adds, whether or not it contracts `a * b + c` or flushes subnormals.
Endpoints are float32 numbers, kept as float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from entrenar_py.backends.rounding import FLOAT64_ROUNDOFF, FLUSHED

# WGSL, "Differences from IEEE-754": an implementation may round up or down.
UNIT = 2.0**-23
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Interval:
    """`low <= what a device holds <= high`, float64, or bool where nobody knows which.

    Infinite on both sides: nothing is known, not even that it is a number.
    """

    low: Tensor
    high: Tensor

    @property
    def size(self) -> Tensor:
        """The largest absolute value in it."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def terms(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The low ends, high ends, sizes, and ones where it is not exactly zero: see `total`."""
        return self.low, self.high, self.size, (self.size > 0).double()

    @property
    def decided(self) -> Tensor:
        """Return where an interval holds one value only, bool."""
        return self.low == self.high


@dataclass(frozen=True)
class Bounded:
    """`value` in float64 (whole numbers and truth values as they are), and what a device may hold.

    Three tensors of one shape.
    """

    value: Tensor
    low: Tensor
    high: Tensor

    @property
    def interval(self) -> Interval:
        return Interval(self.low, self.high)

    @property
    def error(self) -> Tensor:
        """The largest distance from `value`, float64; infinite where nothing is known."""
        low, value, high = self.low.double(), self.value.double(), self.high.double()
        distance = torch.maximum(high - value, value - low)
        distance = torch.where(low == high, (value - low).nan_to_num(0.0), distance)
        return distance.nan_to_num(torch.inf, posinf=torch.inf)


def exactly(x: Tensor) -> Interval:
    """Return `x` itself; a subnormal number may be zero."""
    return flush(Interval(x, x))


def rounded(low: Tensor, high: Tensor) -> Interval:
    """Results of one correctly rounded operation whose exact results lie in [low, high].

    WGSL: `x + y`, `x - y`, `x * y` are correctly rounded, up or down. A result that is a float32
    number is exact.
    """
    below, above = low.float(), high.float()
    infinity = torch.tensor(torch.inf)
    below = torch.where(below.double() > low, torch.nextafter(below, -infinity), below)
    above = torch.where(above.double() < high, torch.nextafter(above, infinity), above)
    return flush(_known(below.double(), above.double()))


def within(low: Tensor, high: Tensor) -> Interval:
    """The float32 numbers in [low, high], where rounding is accounted for already."""
    low, high = low.clamp(max=_LARGEST), high.clamp(min=-_LARGEST)  # what overflows may round to it
    above, below = low.float(), high.float()
    infinity = torch.tensor(torch.inf)
    above = torch.where(above.double() < low, torch.nextafter(above, infinity), above)
    rounded_up = (below.double() > high) & (high <= _LARGEST)
    below = torch.where(rounded_up, torch.nextafter(below, -infinity), below)
    above = torch.where(low < -_LARGEST, -infinity, above)
    below = torch.where(high > _LARGEST, infinity, below)
    # Where no float32 number lies between, a mistake of ours must not become an empty interval.
    empty = above > below
    low, high = torch.where(empty, low, above.double()), torch.where(empty, high, below.double())
    return flush(_known(low, high))


def near(
    low: Tensor, high: Tensor, *, relative: Tensor | float, absolute: Tensor | float
) -> Interval:
    """Return [low, high], widened at each end by a relative and an absolute error."""
    return within(low - _slack(low, relative, absolute), high + _slack(high, relative, absolute))


def _slack(x: Tensor, relative: Tensor | float, absolute: Tensor | float) -> Tensor:
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    # ULPs of a subnormal number are those of the smallest normal one.
    floor = torch.where((size > 0) & (size < FLUSHED), FLUSHED, size)
    return floor * (torch.as_tensor(relative) + 4 * FLOAT64_ROUNDOFF) + absolute


def flush(given: Interval) -> Interval:
    """WGSL: "inputs or outputs of operations ... may be flushed to zero" where subnormal."""
    if not given.low.is_floating_point():
        return given
    low = torch.where((given.low > 0) & (given.low < FLUSHED), 0.0, given.low)
    high = torch.where((given.high < 0) & (given.high > -FLUSHED), 0.0, given.high)
    return Interval(low, high)


def _known(low: Tensor, high: Tensor) -> Interval:
    """Make an interval unknown where an end is NaN."""
    unknown = low.isnan() | high.isnan()
    return Interval(low.masked_fill(unknown, -torch.inf), high.masked_fill(unknown, torch.inf))


def hull(*corners: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of several; NaN where one is NaN."""
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def add(a: Interval, b: Interval) -> Interval:
    """WGSL: correctly rounded."""
    return rounded(_sum_below(a.low, b.low), -_sum_below(-a.high, -b.high))


def _sum_below(a: Tensor, b: Tensor) -> Tensor:
    """a + b, or the float64 number below where that was rounded up (Knuth's TwoSum)."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    return torch.where(error < 0, torch.nextafter(total, torch.full_like(total, -torch.inf)), total)


def negate(a: Interval) -> Interval:
    """Exact."""
    return Interval(-a.high, -a.low)


def multiply(a: Interval, b: Interval) -> Interval:
    """WGSL: correctly rounded. The product of two float32 numbers is exact in float64."""
    return rounded(*hull(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high))


def square(a: Interval) -> Interval:
    """Multiply a number by itself; the result is never negative."""
    low, high = hull(a.low * a.low, a.high * a.high)
    return rounded(torch.where((a.low <= 0) & (a.high >= 0), 0.0, low), high)


def divide(a: Interval, b: Interval) -> Interval:
    """WGSL: 2.5 ULP for |b| in [2^-126, 2^126]; a larger one's reciprocal may be flushed."""
    low, high = hull(a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high)
    crosses = (b.low <= 0) & (b.high >= 0)
    low = torch.where(crosses, torch.nan, low)
    large = b.size > 2.0**126
    low = torch.where(large, low.clamp(max=0), low)
    high = torch.where(large, high.clamp(min=0), high)
    return near(low, high, relative=2.5 * UNIT, absolute=0.0)


def gamma(count: Tensor) -> Tensor:
    """k u / (1 - k u): the largest relative error after k roundings (Higham, section 3.1)."""
    unit = UNIT + 2 * FLOAT64_ROUNDOFF
    product = count.clamp(min=0) * unit
    return torch.where(product < 1, product / (1 - product), torch.inf)


def total(low: Tensor, high: Tensor, size: Tensor, count: Tensor) -> Interval:
    """Sums whose exact values lie in [low, high], of `count` terms with absolute sum `size`.

    In any order: every term passes through at most count - 1 additions (Higham, section 4.2).
    Terms that are exactly zero need not be counted. What is flushed on the way is 2^-126 each.
    """
    error = gamma(count - 1) * size
    error = error + torch.where(size > 0, 4 * FLOAT64_ROUNDOFF * count * size, 0.0)
    small = (size > 0) & (size < FLUSHED / UNIT)  # else no partial sum's loss is seen
    error = error + torch.where(small, count * FLUSHED, 0.0)
    return within(low - error, high + error)


def sum_over(a: Interval, dims: Sequence[int], *, keepdim: bool) -> Interval:
    """Along `dims`; all of them if empty."""
    dims = list(dims) or list(range(a.low.ndim))
    if not dims:
        return a
    return total(*(one.sum(dims, keepdim=keepdim) for one in a.terms))


def matmul(a: Interval, b: Interval) -> Interval:
    """Multiply [..., m, k] and [..., k, n], in any order of summation (Higham, eq. 3.5)."""
    middle_a, radius_a = _middle(a)
    middle_b, radius_b = _middle(b)
    middle = middle_a @ middle_b
    radius = middle_a.abs() @ radius_b + radius_a @ (middle_b.abs() + radius_b)
    size = a.size @ b.size
    count = (a.size > 0).double() @ (b.size > 0).double()
    # What is flushed is a product or a partial sum, 2^-126 each.
    error = gamma(count) * size + 4 * FLOAT64_ROUNDOFF * count * size + 2 * FLUSHED * count
    error = radius + torch.where(count > 0, error, 0.0)
    return within(middle - error, middle + error)


def _middle(a: Interval) -> tuple[Tensor, Tensor]:
    middle = (a.low + a.high) / 2
    return middle, torch.where(a.decided, 0.0, (a.high - a.low) / 2 + middle.abs() * 2.0**-52)
