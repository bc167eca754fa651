"""Pointwise operations and reductions along any dims: their WGSL, and how they fuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from entrenar_py.compute.wgpu import values
from entrenar_py.compute.wgpu.codegen import literal
from entrenar_py.compute.wgpu.emitter import Emitter, Fold
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.values import CHEAP, FEW_ROWS, Schedule, Value, join_rows

Operand = Value | float | int | bool

# Types of operations: operands have the result's dtype, their common dtype, or bool.
ARITHMETIC, COMPARING, LOGICAL = "arithmetic", "comparing", "logical"


@dataclass(frozen=True)
class Scalar:
    """The WGSL templates of one operation, for operands of each dtype; "" if unsupported."""

    f32: str
    i32: str = ""
    kind: str = ARITHMETIC
    cost: int = 1
    bool: str = ""


def _floats(template: str, cost: int = 4) -> Scalar:
    return Scalar(template, cost=cost)


def _both(template: str) -> Scalar:
    return Scalar(template, template)


def _compare(sign: str) -> Scalar:
    template = f"{{0}} {sign} {{1}}"
    equal = sign if sign in ("==", "!=") else ""
    return Scalar(template, template, COMPARING, bool=f"{{0}} {equal} {{1}}" if equal else "")


# The part of aten's name before the dot -> its templates.
SCALARS = {
    "add": Scalar("{0} + {1}", "{0} + {1}", bool="{0} || {1}"),
    "sub": _both("{0} - {1}"),
    "mul": Scalar("{0} * {1}", "{0} * {1}", bool="{0} && {1}"),
    "div": _floats("{0} / {1}", 2),
    "div_floor": Scalar("floor_divide_f32({0}, {1})", "floor_divide_i32({0}, {1})", cost=12),
    "div_trunc": Scalar("trunc_divide_f32({0}, {1})", "{0} / {1}", cost=12),
    "remainder": Scalar(
        "remainder_f32({0}, {1})", "{0} - floor_divide_i32({0}, {1}) * {1}", cost=12
    ),
    "fmod": Scalar("modulo({0}, {1})", "{0} - {0} / {1} * {1}", cost=10),
    "neg": _both("-{0}"),
    "abs": _both("abs({0})"),
    "sign": _both("sign({0})"),
    "reciprocal": _floats("1.0 / {0}", 2),
    "exp": _floats("exp({0})"),
    "log": _floats("log({0})"),
    "sqrt": _floats("sqrt({0})", 2),
    "rsqrt": _floats("inverseSqrt({0})", 2),
    "sin": _floats("sin({0})"),
    "cos": _floats("cos({0})"),
    "tanh": _floats("tangent({0})", 10),
    "sigmoid": _floats("sigmoid({0})", 6),
    "erf": _floats("error_function({0})", 12),
    "floor": _floats("floor({0})", 1),
    "ceil": _floats("ceil({0})", 1),
    "trunc": _floats("trunc({0})", 1),
    "round": _floats("round({0})", 1),
    "pow": _floats("power({0}, {1})", 10),
    "relu": Scalar("larger({0}, 0.0f)", "max({0}, 0)"),
    "maximum": Scalar("larger({0}, {1})", "max({0}, {1})", bool="{0} || {1}"),
    "minimum": Scalar("smaller({0}, {1})", "min({0}, {1})", bool="{0} && {1}"),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "isnan": Scalar("is_nan({0})", "false", COMPARING),
    "isinf": Scalar("is_infinite({0})", "false", COMPARING),
    "logical_and": Scalar("", "", LOGICAL, bool="{0} && {1}"),
    "logical_or": Scalar("", "", LOGICAL, bool="{0} || {1}"),
    "logical_xor": Scalar("", "", LOGICAL, bool="{0} != {1}"),
    "logical_not": Scalar("", "", LOGICAL, bool="!{0}"),
    "bitwise_and": Scalar("", "{0} & {1}", bool="{0} && {1}"),
    "bitwise_or": Scalar("", "{0} | {1}", bool="{0} || {1}"),
    "bitwise_xor": Scalar("", "{0} ^ {1}", bool="{0} != {1}"),
    "bitwise_not": Scalar("", "~{0}", bool="!{0}"),
    "where": Scalar("select({1}, {0}, {2})", "select({1}, {0}, {2})", bool="select({1}, {0}, {2})"),
}

_RANK = {"bool": 0, "i32": 1, "f32": 2}
# Powers that are products or roots: exact for negative bases, and cheaper.
_POWERS = {
    -2.0: "1.0 / ({0} * {0})",
    -1.0: "1.0 / {0}",
    -0.5: "inverseSqrt({0})",
    0.5: "sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    4.0: "({0} * {0}) * ({0} * {0})",
}


def constant(value: float, dtype: str, shape: Sequence[int] = ()) -> Value:
    """Return a tensor with `value` in all elements."""
    text = literal(value, dtype)
    return Value(tuple(shape), dtype, lambda emitter, indices: text)


def apply(
    schedule: Schedule, name: str, operands: Sequence[Operand], shape: Sequence[int], dtype: str
) -> Value | None:
    """Return operation `name` of SCALARS, broadcast to `shape`; None for unsupported dtypes."""
    scalar = SCALARS[name]
    template, inner = _template(name, scalar, operands, dtype)
    cost = 2 if template in _POWERS.values() else scalar.cost
    if not template:
        return None
    taken = [cast(schedule, one, inner) for one in operands]
    if name == "where":
        taken = [*taken[:2], cast(schedule, operands[2], "bool")]
    return fuse(schedule, template, taken, shape, dtype, cost=cost)


def _template(
    name: str, scalar: Scalar, operands: Sequence[Operand], dtype: str
) -> tuple[str, str]:
    """Return the WGSL template of an operation, and the dtype of its operands."""
    if scalar.kind == LOGICAL:
        return scalar.bool, "bool"
    inner = dtype
    if scalar.kind == COMPARING:
        inner = common(operands)
    exponent = operands[1] if name == "pow" else None
    if isinstance(exponent, int | float) and (inner == "f32" or exponent >= 1):
        known = _POWERS.get(float(exponent))
        if known is not None:
            return known, inner
    return {"f32": scalar.f32, "i32": scalar.i32, "bool": scalar.bool}[inner], inner


def common(operands: Sequence[Operand]) -> str:
    """Return the dtype to which torch promotes `operands` before it compares them."""
    tensors = [one.dtype for one in operands if isinstance(one, Value)]
    numbers = [_type(one) for one in operands if not isinstance(one, Value)]
    return max([*tensors, *numbers], key=lambda one: _RANK[one])


def _type(number: float | int | bool) -> str:
    if isinstance(number, bool):
        return "bool"
    return "i32" if isinstance(number, int) else "f32"


def cast(schedule: Schedule, operand: Operand, dtype: str) -> Value:
    """Return `operand` as a tensor of `dtype`."""
    if not isinstance(operand, Value):
        return constant(operand, dtype)
    if operand.dtype == dtype:
        return operand
    zero = {"f32": "{0} != 0.0f", "i32": "{0} != 0", "bool": "{0}"}
    template = zero[operand.dtype] if dtype == "bool" else f"{dtype}({{0}})"
    return fuse(schedule, template, [operand], operand.shape, dtype)


def where(schedule: Schedule, condition: Value, a: Value, b: Operand) -> Value:
    """Return `a` where `condition` is true, else `b`, with the shape and dtype of `a`."""
    operands = [a, cast(schedule, b, a.dtype), condition]
    return fuse(schedule, SCALARS["where"].f32, operands, a.shape, a.dtype)


def fuse(
    schedule: Schedule,
    template: str,
    operands: Sequence[Value],
    shape: Sequence[int],
    dtype: str,
    *,
    cost: int = 1,
) -> Value:
    """Return the recipe that applies `template` to the operands' elements."""
    to = tuple(shape)
    product = _settle_products(schedule, operands, math.prod(to))
    if join_rows(to, operands) is None or product is not None:
        for operand in operands:
            if operand.rows is not None:
                schedule.realise(operand)
    for operand in operands:
        if operand.size < math.prod(to) and not operand.pending and operand.cost > CHEAP:
            schedule.realise(operand)
    schedule.make_room(operands, cost)
    recipes = [(operand.read, operand.shape) for operand in operands]

    def read(emitter: Emitter, indices: Indices) -> str:
        names = [recipe(emitter, values.broadcast(indices, own)) for recipe, own in recipes]
        return emitter.op(template, *names) if template != "{0}" else names[0]

    return Value(
        *(to, dtype, read),
        reads=frozenset().union(*(operand.reads for operand in operands)),
        cost=cost + sum(operand.cost for operand in operands),
        rows=join_rows(to, operands),
        product=None if product is None else product.product,
    )


def _settle_products(schedule: Schedule, operands: Sequence[Value], size: int) -> Value | None:
    """Return the last pending product that is not broadcast; store all other pending products."""
    kept = None
    for operand in operands:
        if operand.product is None or operand is kept:
            continue
        if operand.size != size:
            schedule.realise(operand)
        elif kept is not None:
            schedule.realise(kept)
            kept = operand
        else:
            kept = operand
    return kept


def counting(start: float, step: float, shape: Sequence[int], dim: int, dtype: str) -> Value:
    """Return a tensor of `start + step * i`, where i is the index along `dim`."""

    def read(emitter: Emitter, indices: Indices) -> str:
        if dtype == "i32":
            return emitter.number(indices[dim] * int(step) + Index(int(start)), "i32")
        number = emitter.number(indices[dim], "f32")
        return emitter.op("{0} + {1} * {2}", literal(start, dtype), literal(step, dtype), number)

    return Value(tuple(shape), dtype, read, cost=1)


_COST = 8  # of one element of a reduction's result
# A workgroup computes one result. Long folds to few results take two steps, to use more workgroups.
_LONG_FOLD = 2**14
_PARTS_MAX = 1024

FOLDS = {
    ("sum", "f32"): Fold("{0} + {1}", "0.0f", "f32"),
    ("sum", "i32"): Fold("{0} + {1}", "0", "i32"),
    ("prod", "f32"): Fold("{0} * {1}", "1.0f", "f32"),
    ("prod", "i32"): Fold("{0} * {1}", "1", "i32"),
    ("amax", "f32"): Fold("larger({0}, {1})", "(-infinity())", "f32"),
    ("amax", "i32"): Fold("max({0}, {1})", "(-2147483647 - 1)", "i32"),
    ("amin", "f32"): Fold("smaller({0}, {1})", "infinity()", "f32"),
    ("amin", "i32"): Fold("min({0}, {1})", "2147483647", "i32"),
    ("any", "bool"): Fold("{0} | {1}", "false", "bool"),
}


def reduce(
    schedule: Schedule, value: Value, fold: Fold, dims: Sequence[int], *, keepdim: bool
) -> Value:
    """Return `value`, of the fold's dtype, folded along `dims`, or along all dims if empty."""
    rank = len(value.shape)
    over = sorted({dim % rank for dim in dims}) if dims and rank else list(range(rank))
    folded = _fold_along(schedule, value, fold, over)
    kept = [size for dim, size in enumerate(value.shape) if dim not in over]
    return folded if keepdim else values.reshape(schedule, folded, kept)


def _fold_along(schedule: Schedule, value: Value, fold: Fold, over: Sequence[int]) -> Value:
    """Fold along the dims `over`, and keep them with size 1."""
    num_folded = math.prod(value.shape[dim] for dim in over)
    if num_folded > _LONG_FOLD and value.size // num_folded < FEW_ROWS:
        dim = max(over, key=value.shape.__getitem__)
        size = value.shape[dim]
        parts = next(one for one in range(min(size, _PARTS_MAX), 0, -1) if size % one == 0)
        if parts > 1:
            return _fold_twice(schedule, value, fold, over, dim, parts)
    if value.product is not None or not _within_rows(value, set(over)):
        schedule.realise(value)
    if num_folded == 1:
        return value
    token, recipe = object(), value.read

    def read(emitter: Emitter, indices: Indices) -> str:
        def body(inner: Indices) -> str:
            whole = list(indices)
            for dim, one in zip(over, inner, strict=True):
                whole[dim] = one
            return recipe(emitter, tuple(whole))

        sizes = [value.shape[dim] for dim in over]
        return emitter.reduce((token, indices), fold, sizes, body)

    shape = tuple(1 if dim in over else size for dim, size in enumerate(value.shape))
    return Value(shape, fold.dtype, read, reads=value.reads, cost=_COST, rows=len(shape))


def _fold_twice(
    schedule: Schedule, value: Value, fold: Fold, over: Sequence[int], dim: int, parts: int
) -> Value:
    """Fold in two steps: within each of `parts` equal parts of `dim`, then over the parts."""
    shape = value.shape
    cut = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    inner = [one + (one >= dim) for one in over]  # the dim of the parts stays
    apart = _fold_along(schedule, values.reshape(schedule, value, cut), fold, inner)
    schedule.realise(apart)
    whole = values.reshape(schedule, apart, (*apart.shape[: dim + 1], *apart.shape[dim + 2 :]))
    return _fold_along(schedule, whole, fold, [dim])


def _within_rows(value: Value, over: set[int]) -> bool:
    """Return whether `over` has all dims inside a pending row, and no dim that selects a row."""
    if value.rows is None:
        return True
    columns = {dim for dim, size in enumerate(value.shape) if dim >= value.rows and size > 1}
    rows = {dim for dim, size in enumerate(value.shape) if dim < value.rows and size > 1}
    return columns <= over and not rows & over


def cumulative_sum(schedule: Schedule, value: Value, dim: int) -> Value:
    """Return cumulative sums along `dim`, with O(n^2) additions for n elements."""
    dim %= max(1, len(value.shape))
    schedule.realise(value)
    size = value.shape[dim]
    square = (*value.shape, size)
    order = [*range(dim), len(value.shape), *range(dim + 1, len(value.shape)), dim]
    spread = values.expand(schedule, values.reshape(schedule, value, (*value.shape, 1)), square)
    spread = values.permute(schedule, spread, order)  # [..., to, ..., from]
    to = counting(0, 1, square, dim, "i32")
    start = counting(0, 1, square, len(value.shape), "i32")
    before = fuse(schedule, "{0} <= {1}", [start, to], square, "bool")
    masked = where(schedule, before, spread, 0)
    return reduce(schedule, masked, FOLDS["sum", value.dtype], [-1], keepdim=False)


def arg_extreme(
    schedule: Schedule, value: Value, name: str, dim: int | None, *, keepdim: bool
) -> Value:
    """Return the index of the first largest (`amax`) or smallest (`amin`) element along `dim`."""
    own = value if dim is not None else values.reshape(schedule, value, [value.size])
    dim = 0 if dim is None else dim % max(1, len(own.shape))
    schedule.realise(own)
    extreme = reduce(schedule, own, FOLDS[name, own.dtype], [dim], keepdim=True)
    schedule.realise(extreme)
    place = counting(0, 1, own.shape, dim, "i32")
    # A NaN is the extreme element, but not equal to itself.
    same = "{0} == {1} || is_nan({0})" if own.dtype == "f32" else "{0} == {1}"
    here = fuse(schedule, same, [own, extreme], own.shape, "bool", cost=2)
    candidates = where(schedule, here, place, own.shape[dim] - 1)
    return reduce(schedule, candidates, FOLDS["amin", "i32"], [dim], keepdim=keepdim)
