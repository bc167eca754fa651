"""Rules that compute the interval of an operation's result from the intervals of its operands.

The rules for functions of one number come first, then the rules of all other operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from entrenar_py.compute import nf4
from entrenar_py.compute.wgpu.bounds import intervals
from entrenar_py.compute.wgpu.bounds.intervals import UNIT, Bounded, Interval
from entrenar_py.shared.errors import UsageError

# The accuracy of each function on a device that conforms to WGSL, as a rule for intervals.
#
# Source: the WGSL specification, section "Floating Point Accuracy" (table "Accuracy of concrete
# floating point operations" and the table of built-in functions); u = 2^-23 >= 1 ULP. For a
# function that WGSL lacks, the bound holds for the formula in its docstring or comment, and
# kernels must be at least as accurate. Derivations: docs/numerics.md.

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


def is_exact(operand: Bounded) -> bool:
    """Return whether `operand` holds integers or bools that no rounding error can change."""
    return not operand.value.is_floating_point() and bool((operand.low == operand.high).all())


def evaluate(target: Any, args: Any, kwargs: Any, pick: Callable[[Bounded], Tensor]) -> Tensor:
    """Return `target` of `pick(operand)` for each operand, with float64 instead of float32."""

    def take(operand: Any) -> Any:
        if isinstance(operand, Bounded):
            return pick(operand)
        return torch.float64 if operand is torch.float32 else operand

    args, kwargs = pytree.tree_map(take, (args, kwargs))
    if target is _ATEN.view.default:  # an interval's strides may differ from the graph's
        target = torch.reshape
    result: Tensor = target(*args, **kwargs)
    return result


def _number(operand: Any) -> Interval:
    """Return the interval of an operand. A Python number is rounded to float32."""
    if not isinstance(operand, Bounded):
        exact = torch.tensor(float(operand), dtype=torch.float64)
        return intervals.rounded(exact, exact)
    if operand.value.is_floating_point():
        return operand.interval
    return intervals.rounded(operand.low.double(), operand.high.double())


def _each_end(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of an operation that moves elements, or is exact and non-decreasing."""
    for one in pytree.tree_leaves(args):
        whole = isinstance(one, Bounded) and not one.value.is_floating_point()
        if whole and one.value.dtype != torch.bool and not is_exact(one):
            raise UsageError(f"{target}: an integer operand depends on rounding; no bound is known")
    return intervals.flush(
        Interval(
            evaluate(target, args, kwargs, lambda one: one.low),
            evaluate(target, args, kwargs, lambda one: one.high),
        )
    )


def _function(target: Any, args: Any, kwargs: Any) -> Interval:
    return FUNCTIONS[target](_number(args[0]), *args[1:], **kwargs)


def _add(target: Any, args: Any, kwargs: Any) -> Interval:
    second = _number(args[1])
    if kwargs.get("alpha", 1) != 1:
        second = intervals.multiply(second, _number(kwargs["alpha"]))
    if target is _ATEN.sub.Tensor:
        second = intervals.negate(second)
    return intervals.add(_number(args[0]), second)


def _multiply(target: Any, args: Any, kwargs: Any) -> Interval:
    if args[0] is args[1]:
        return intervals.square(_number(args[0]))
    return intervals.multiply(_number(args[0]), _number(args[1]))


def _whole_quotient(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of a quotient rounded to an integer: exact below 2^21, else within 8 ULP.

    The interval is unknown if an operand is inexact: the quotient may be on either side of an
    integer.
    """
    value = evaluate(target, args, kwargs, lambda one: one.value)
    slack = torch.where(value.abs() < 2.0**21, 0.0, 8 * intervals.UNIT)
    return _if_decided(intervals.near(value, value, relative=slack, absolute=0.0), args)


def _remainder(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of a remainder: an exact fmod, and one addition to correct its sign."""
    value = evaluate(target, args, kwargs, lambda one: one.value)
    return _if_decided(intervals.rounded(value, value), args)


def _if_decided(interval: Interval, args: Any) -> Interval:
    decided = _number(args[0]).decided & _number(args[1]).decided
    return Interval(
        torch.where(decided, interval.low, -torch.inf),
        torch.where(decided, interval.high, torch.inf),
    )


def _sum(target: Any, args: Any, kwargs: Any) -> Interval:
    dims = args[1] if len(args) > 1 and args[1] is not None else ()
    return intervals.sum_over(_number(args[0]), dims, keepdim=len(args) > 2 and args[2])


def _cumsum(target: Any, args: Any, kwargs: Any) -> Interval:
    return intervals.total(*(part.cumsum(args[1]) for part in _number(args[0]).terms))


def _index_put(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of elements that are overwritten, or added to in any order."""
    base, indices, source, *accumulate = args
    if not (accumulate and accumulate[0]):
        return _each_end(target, args, kwargs)
    places = [None if one is None else one.value for one in indices]
    terms = zip(_number(base).terms, _number(source).terms, strict=True)
    return intervals.total(*(target(here, places, there, True) for here, there in terms))


def _scatter_add(target: Any, args: Any, kwargs: Any) -> Interval:
    base, dim, index, source = args
    terms = zip(_number(base).terms, _number(source).terms, strict=True)
    return intervals.total(*(target(here, dim, index.value, there) for here, there in terms))


def _scatter_value(target: Any, args: Any, kwargs: Any) -> Interval:
    base, dim, index, number = args
    base, value = _number(base), _number(number)
    return Interval(
        target(base.low, dim, index.value, float(value.low)),
        target(base.high, dim, index.value, float(value.high)),
    )


# Comparisons: decided where all values in both intervals give the same result.


def _less(a: Interval, b: Interval) -> Interval:
    return Interval(a.high < b.low, a.low < b.high)


def _less_or_equal(a: Interval, b: Interval) -> Interval:
    return Interval(a.high <= b.low, a.low <= b.high)


def _equal(a: Interval, b: Interval) -> Interval:
    overlap = (a.low <= b.high) & (b.low <= a.high)
    return Interval(a.decided & b.decided & (a.low == b.low), overlap)


def _flip(one: Interval) -> Interval:
    return Interval(~one.high, ~one.low)


def _of_two(interval: Callable[[Interval, Interval], Interval]) -> Rule:
    return lambda target, args, kwargs: interval(_number(args[0]), _number(args[1]))


def _where(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of `where`: the hull of both branches if the condition is undecided."""
    condition = args[0]
    a, b = _number(args[1]), _number(args[2])
    decided = condition.interval.decided
    low, high = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    return Interval(
        torch.where(decided, torch.where(condition.value, a.low, b.low), low),
        torch.where(decided, torch.where(condition.value, a.high, b.high), high),
    )


def _logical(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of and, or, any, which are monotonic in their operands."""
    return Interval(
        evaluate(target, args, kwargs, lambda one: one.low.bool()),
        evaluate(target, args, kwargs, lambda one: one.high.bool()),
    )


def _not(target: Any, args: Any, kwargs: Any) -> Interval:
    return Interval(~args[0].high.bool(), ~args[0].low.bool())


def _known_truth(target: Any, args: Any, kwargs: Any) -> Interval:
    operands = [one for one in args if isinstance(one, Bounded)]
    value = evaluate(target, args, kwargs, lambda one: one.value)
    decided = torch.stack([one.interval.decided.expand(value.shape) for one in operands]).all(0)
    return Interval(value & decided, value | ~decided)


def _argument(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of an extreme element's index: all indices if any element is inexact."""
    value = evaluate(target, args, kwargs, lambda one: one.value)
    if bool(args[0].interval.decided.all()):
        return Interval(value, value)
    return Interval(torch.zeros_like(value), torch.full_like(value, args[0].value.numel() - 1))


def _convert(target: Any, args: Any, kwargs: Any) -> Interval:
    if not evaluate(target, args, kwargs, lambda one: one.value).is_floating_point():
        return _each_end(target, args, kwargs)  # rounds towards zero, which is non-decreasing
    return _number(args[0])


def _range(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of start + i * step: exact integers, or two rounded operations."""
    values = evaluate(target, args, kwargs, lambda one: one.value)
    if bool((values == values.round()).all()) and bool((values.abs() <= 2**24).all()):
        return Interval(values, values)
    size = 4 * intervals.UNIT * values.abs().max()
    return intervals.within(values - size, values + size)


def _full(target: Any, args: Any, kwargs: Any) -> Interval:
    exact = torch.full(args[0], float(args[1]), dtype=torch.float64)
    return intervals.rounded(exact, exact)


def _clamp(target: Any, args: Any, kwargs: Any) -> Interval:
    x = _number(args[0])
    for pick, limit in zip((torch.maximum, torch.minimum), args[1:], strict=False):
        if limit is not None:
            end = _number(limit)
            x = Interval(pick(x.low, end.low), pick(x.high, end.high))
    return x


def _nf4(target: Any, args: Any, kwargs: Any) -> Interval:
    """Return the interval of level * (level of the scale * second scale + mean of the scales).

    A product with the result may be computed in another order, which rounds once more.
    """
    codes, scales, second, shape, _ = args
    table = _number(second)

    def taken(pick: Callable[[Tensor], Tensor]) -> Interval:
        return Interval(pick(table.low), pick(table.high))

    levels = taken(lambda end: end[scales.value.long()])
    spread = taken(lambda end: nf4.second_scales(end, len(scales.value)))
    scale = intervals.add(intervals.multiply(levels, spread), taken(lambda end: end[nf4.MEAN]))
    size = math.prod(shape)
    weights = intervals.exactly(nf4.levels(codes.value, size).double())
    decoded = intervals.multiply(
        weights,
        Interval(*(end.repeat_interleave(nf4.BLOCK)[:size] for end in (scale.low, scale.high))),
    )
    low, high = (end.reshape(list(shape)) for end in (decoded.low, decoded.high))
    return intervals.near(low, high, relative=intervals.UNIT, absolute=0.0)


_ENDS = (
    _ATEN.amax.default,
    _ATEN.amin.default,
    _ATEN.cat.default,
    _ATEN.ceil.default,
    _ATEN.clone.default,
    _ATEN.constant_pad_nd.default,
    _ATEN.embedding.default,
    _ATEN.expand.default,
    _ATEN.floor.default,
    _ATEN.gather.default,
    _ATEN.index.Tensor,
    _ATEN.index_select.default,
    _ATEN.maximum.default,
    _ATEN.minimum.default,
    _ATEN.permute.default,
    _ATEN.relu.default,
    _ATEN.repeat.default,
    _ATEN.round.default,
    _ATEN.scatter.src,
    _ATEN.select.int,
    _ATEN.sign.default,
    _ATEN.slice.Tensor,
    _ATEN.slice_scatter.default,
    _ATEN.squeeze.dims,
    _ATEN.trunc.default,
    _ATEN.unfold.default,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ENDS, _each_end),
    **dict.fromkeys(FUNCTIONS, _function),
    _ATEN._to_copy.default: _convert,
    _ATEN.add.Tensor: _add,
    _ATEN.any.dim: _logical,
    _ATEN.any.default: _logical,
    _ATEN.arange.start_step: _range,
    _ATEN.argmax.default: _argument,
    _ATEN.argmin.default: _argument,
    _ATEN.bitwise_and.Tensor: _logical,
    _ATEN.bitwise_not.default: _not,
    _ATEN.bitwise_or.Tensor: _logical,
    _ATEN.bitwise_xor.Tensor: _known_truth,
    _ATEN.bmm.default: _of_two(intervals.matmul),
    _ATEN.clamp.default: _clamp,
    _ATEN.cumsum.default: _cumsum,
    _ATEN.div.Tensor: _of_two(intervals.divide),
    _ATEN.div.Tensor_mode: _whole_quotient,
    _ATEN.full.default: _full,
    _ATEN.index_put.default: _index_put,
    _ATEN.isinf.default: _known_truth,
    _ATEN.isnan.default: _known_truth,
    _ATEN.logical_and.default: _logical,
    _ATEN.logical_not.default: _not,
    _ATEN.logical_or.default: _logical,
    _ATEN.logical_xor.default: _known_truth,
    _ATEN.mm.default: _of_two(intervals.matmul),
    _ATEN.mul.Tensor: _multiply,
    torch.ops.entrenar.nf4.default: _nf4,
    _ATEN.reciprocal.default: lambda target, args, kwargs: intervals.divide(
        _number(1.0), _number(args[0])
    ),
    **dict.fromkeys((_ATEN.fmod.Scalar, _ATEN.fmod.Tensor), _remainder),
    **dict.fromkeys((_ATEN.remainder.Scalar, _ATEN.remainder.Tensor), _remainder),
    _ATEN.scatter.value: _scatter_value,
    _ATEN.scatter_add.default: _scatter_add,
    _ATEN.sub.Tensor: _add,
    _ATEN.sum.default: _sum,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.where.self: _where,
}
for _name, _compare in (
    ("eq", _equal),
    ("ge", lambda a, b: _less_or_equal(b, a)),
    ("gt", lambda a, b: _less(b, a)),
    ("le", _less_or_equal),
    ("lt", _less),
    ("ne", lambda a, b: _flip(_equal(a, b))),
):
    RULES[getattr(_ATEN, _name).Scalar] = _of_two(_compare)
    RULES[getattr(_ATEN, _name).Tensor] = _of_two(_compare)
