"""The accuracy of each function on a device that conforms to WGSL, as a rule for intervals.

Source: the WGSL specification, section "Floating Point Accuracy" (table "Accuracy of concrete
floating point operations" and the table of built-in functions); u = 2^-23 >= 1 ULP. For a function
that WGSL lacks, the bound is that of the formula in its docstring or comment, and kernels must be
at least as accurate. Derivations: docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from entrenar_py.compute.wgpu.bounds import intervals
from entrenar_py.compute.wgpu.bounds.intervals import UNIT, Interval

Rule = Callable[..., Interval]
_ATEN = torch.ops.aten


def _increasing(
    function: Callable[[Tensor], Tensor],
    relative: Callable[[Tensor], Tensor | float],
    absolute: Callable[[Tensor], Tensor | float] = lambda x: 0.0,
) -> Rule:
    """Return the rule for a non-decreasing `function`, with errors that depend on its argument."""

    def rule(x: Interval) -> Interval:
        low, high = function(x.low), function(x.high)
        below = intervals.near(low, low, relative=relative(x.low), absolute=absolute(x.low))
        above = intervals.near(high, high, relative=relative(x.high), absolute=absolute(x.high))
        return Interval(below.low, above.high)

    return rule


def _exp_error(x: Tensor) -> Tensor:
    """Return the relative error of exp: 3 + 2|x| ULP by WGSL; exp is 0 or inf for |x| > 200."""
    return (3 + 2 * x.abs().clamp(max=200)) * UNIT


def _log_error(x: Tensor) -> Tensor:
    """Return the absolute error of log: 2^-21 in [0.5, 2] by WGSL. `_log` adds 3 ULP for any x."""
    return torch.where((x > 0.49) & (x < 2.01), 2.0**-21, 0.0)


def _sigmoid_error(x: Tensor) -> Tensor:
    """Return the relative error of 1 / (1 + e) with e = exp(-x), or e / (1 + e) with e = exp(x).

    In both formulas, a relative error of e is multiplied by sigmoid(-x).
    """
    return _exp_error(x) * torch.sigmoid(-x) + 4 * UNIT


def _tanh_error(x: Tensor) -> Tensor:
    """Return the absolute error of 1 - 2 / (exp(2x) + 1), or of (1 - e) / (1 + e), e = exp(-2|x|).

    Kernels don't use WGSL's own tanh: it may be off by 1e-5, and NaN for large x.
    """
    e = torch.exp(-2 * x.abs())
    return 2 * e / (1 + e).square() * _exp_error(2 * x) + 9 * UNIT


def _wave(function: Callable[[Tensor], Tensor], x: Interval) -> Interval:
    """Return the interval of sin or cos: 2^-11 absolute by WGSL, in [-pi, pi].

    WGSL has no bound for other x: 4 u |x| allows for a device that reduces x to this range.
    """
    middle, radius = (x.low + x.high) / 2, (x.high - x.low) / 2
    value, error = function(middle), radius + (2.0**-11 + 4 * UNIT * x.size)
    return intervals.within(value - error, value + error)


def _rsqrt(x: Interval) -> Interval:
    """Return the interval of 1 / sqrt(x): 2 ULP by WGSL."""
    high = torch.where(x.low <= 0, torch.inf, x.low.clamp(min=0).rsqrt())
    low = torch.where(x.high < 0, torch.nan, x.high.clamp(min=0).rsqrt())
    return intervals.near(low, high, relative=2 * UNIT, absolute=0.0)


def _sqrt(x: Interval) -> Interval:
    """Return the interval of sqrt: 1 / inverseSqrt(x) by WGSL, so 2 + 2.5 ULP."""
    low = torch.where(x.high < 0, torch.nan, x.low.clamp(min=0).sqrt())
    return intervals.near(low, x.high.clamp(min=0).sqrt(), relative=5 * UNIT, absolute=0.0)


def _log(x: Interval) -> Interval:
    low = torch.where(x.high < 0, torch.nan, x.low.clamp(min=0))
    return _increasing(torch.log, lambda x: 3 * UNIT, _log_error)(Interval(low, x.high))


def _absolute(x: Interval) -> Interval:
    low, high = intervals.hull(x.low.abs(), x.high.abs())
    return Interval(torch.where((x.low < 0) & (x.high > 0), 0.0, low), high)


def _power(x: Interval, exponent: float) -> Interval:
    """Return the interval of x**exponent: by products, by square roots, or by WGSL's pow."""
    if exponent == int(exponent) and abs(exponent) <= 8:
        return _whole_power(x, int(exponent))
    if exponent == 0.5:
        return _sqrt(x)
    if exponent == -0.5:
        return _rsqrt(x)
    return _general_power(x, float(exponent))


def _whole_power(x: Interval, exponent: int) -> Interval:
    if exponent == 0:
        return Interval(torch.ones_like(x.low), torch.ones_like(x.low))
    if exponent < 0:
        one = torch.ones((), dtype=torch.float64)
        return intervals.divide(Interval(one, one), _whole_power(x, -exponent))
    if exponent <= 2:
        return x if exponent == 1 else intervals.square(x)
    low, high = intervals.hull(x.low**exponent, x.high**exponent)
    if exponent % 2 == 0:
        low = torch.where((x.low <= 0) & (x.high >= 0), 0.0, low)
    return intervals.near(low, high, relative=(exponent - 1) * 1.001 * UNIT, absolute=0.0)


def _general_power(x: Interval, exponent: float) -> Interval:
    """Return the interval of pow: exp2(y * log2(x)) by WGSL.

    An absolute error of exp2's argument is a relative error of the result.
    """
    low = torch.where(x.low < 0, torch.nan, x.low)

    def error(x: Tensor) -> Tensor:
        log2 = torch.log2(x).abs().clamp(max=150)
        product = abs(exponent) * log2
        absolute = abs(exponent) * (3 * UNIT * log2 + 2.0**-21) + product * UNIT
        return 1.01 * (0.7 * absolute + (3 + 2 * product.clamp(max=200)) * UNIT)

    def power(x: Tensor) -> Tensor:
        return x**exponent

    if exponent > 0:
        return _increasing(power, error)(Interval(low, x.high))
    turned = _increasing(lambda x: power(-x), lambda x: error(-x))
    return turned(intervals.negate(Interval(low, x.high)))


FUNCTIONS: dict[Any, Rule] = {
    _ATEN.abs.default: _absolute,
    _ATEN.cos.default: partial(_wave, torch.cos),
    # WGSL has no erf. The absolute error is 1.5e-7 of Abramowitz and Stegun 7.1.26, plus rounding.
    _ATEN.erf.default: _increasing(torch.erf, lambda x: 0.0, lambda x: 2.0**-19),
    _ATEN.exp.default: _increasing(torch.exp, _exp_error),
    _ATEN.log.default: _log,
    _ATEN.neg.default: intervals.negate,
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.rsqrt.default: _rsqrt,
    _ATEN.sigmoid.default: _increasing(torch.sigmoid, _sigmoid_error),
    _ATEN.sin.default: partial(_wave, torch.sin),
    _ATEN.sqrt.default: _sqrt,
    _ATEN.tanh.default: _increasing(torch.tanh, lambda x: 0.0, _tanh_error),
}
