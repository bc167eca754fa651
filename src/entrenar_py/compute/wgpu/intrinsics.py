"""WGSL functions that kernels call where the built-in ones are missing or inaccurate; literals.

WGSL has no literals for infinity and NaN, and compilers may assume that neither occurs. Kernels
get both from the bits of a variable, which compilers don't evaluate.
"""

from __future__ import annotations

import math
import re

import numpy as np

from entrenar_py.compute import draws, nf4


def _nf4_level() -> str:
    found = [f"{level!r}f" for level in nf4.LEVELS]
    for bit in range(4):
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [f"select({one}, {other}, bit_{bit})" for one, other in pairs]
    bits = [f"    let bit_{bit} = (code & {1 << bit}u) != 0u;" for bit in range(4)]
    lines = ["", "fn nf4_level(code: u32) -> f32 {", *bits, f"    return {found[0]};", "}", ""]
    return "\n".join(lines)


def _random_bits() -> str:
    """Return WGSL of `draws.threefry` for one element: its word of the pair that it is in."""
    lines = []
    for number in range(1, draws.NUM_INJECTIONS + 1):
        lines += [
            f"    x += y; y = ((y << {one}u) | (y >> {32 - one}u)) ^ x;"
            for one in draws.ROTATIONS[(number - 1) % 2]
        ]
        lines.append(f"    x += key[{number % 3}]; y += key[{(number + 1) % 3}] + {number}u;")
    rounds = "\n".join(lines)
    return f"""
fn random_bits(first: i32, second: i32, draw: u32, element: i32) -> u32 {{
    let a = bitcast<u32>(first);
    let b = bitcast<u32>(second);
    let key = array<u32, 3>(a, b, a ^ b ^ {draws.PARITY}u);
    var x = (bitcast<u32>(element) >> 1u) + a;
    var y = draw + b;
{rounds}
    return select(x, y, (element & 1) == 1);
}}
"""


FUNCTIONS = {  # in order: a function follows those that it calls
    "infinity": """
var<private> infinity_bits: u32 = 0x7f800000u;
fn infinity() -> f32 { return bitcast<f32>(infinity_bits); }
""",
    "nan": """
var<private> nan_bits: u32 = 0x7fc00000u;
fn nan() -> f32 { return bitcast<f32>(nan_bits); }
""",
    # Tests bits, because a compiler that assumes no NaN takes `x != x` for false.
    "is_nan": """
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
""",
    "is_infinite": """
fn is_infinite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }
""",
    # The float32 of an f16's bits. Subnormal ones are exact, which unpack2x16float may flush.
    "from_f16": """
fn from_f16(bits: u32) -> f32 {
    let rest = bits & 0x7fffu;
    let normal = bitcast<f32>((rest << 13u) + select(0x38000000u, 0x70000000u, rest >= 0x7c00u));
    let size = select(normal, f32(rest) * 5.9604644775390625e-8, rest < 0x400u);
    return bitcast<f32>(bitcast<u32>(size) | ((bits & 0x8000u) << 16u));
}
""",
    # A level of NF4, by its code: a tree of choices.
    "nf4_level": _nf4_level(),
    # NaN if either operand is NaN, as in torch.
    "larger": """
fn larger(a: f32, b: f32) -> f32 {
    return select(select(max(a, b), b, is_nan(b)), a, is_nan(a));
}
""",
    "smaller": """
fn smaller(a: f32, b: f32) -> f32 {
    return select(select(min(a, b), b, is_nan(b)), a, is_nan(a));
}
""",
    # Replaces tanh, which is NaN for large x on some drivers. The quotient loses digits near 0.
    "tangent": """
fn tangent(x: f32) -> f32 {
    let size = abs(x);
    let square = x * x;
    let e = exp(-2.0 * size);
    let large = sign(x) * ((1.0 - e) / (1.0 + e));
    let small = x * (1.0 + square * (-0.33333334 + square * (0.13333334
        + square * (-0.053968255 + square * 0.021869488))));
    return select(select(large, small, size < 0.25), x, is_nan(x));
}
""",
    "sigmoid": """
fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(1.0, e, x < 0.0) / (1.0 + e);
}
""",
    # Abramowitz and Stegun 7.1.26, which is off by 1.5e-7; a series near 0, where that is too much.
    "error_function": """
fn error_function(x: f32) -> f32 {
    let size = abs(x);
    let t = 1.0 / (1.0 + 0.3275911 * size);
    let tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741
        + t * (-1.453152027 + t * 1.061405429)))) * exp(-size * size);
    let square = x * x;
    let series = x * (1.1283792 + square * (-0.37612638 + square * (0.11283792
        + square * (-0.026866170 + square * (0.0052239776 + square * (-0.00085483270
        + square * 0.00012055333))))));
    return select(select(sign(x) * (1.0 - tail), series, size < 0.5), x, is_nan(x));
}
""",
    # WGSL's pow has no negative bases.
    "power": """
fn power(x: f32, y: f32) -> f32 {
    let size = pow(abs(x), y);
    let odd = abs(y - 2.0 * trunc(y * 0.5)) == 1.0;
    let whole = trunc(y) == y;
    let found = select(size, -size, x < 0.0 && odd);
    return select(select(found, nan(), x < 0.0 && !whole), 1.0, y == 0.0);
}
""",
    # An exact fmod, with the sign of a: long division of the significands, eight bits at a time.
    # `a - trunc(a / b) * b` is not exact: WGSL's quotients may be 2.5 ULP off, and a large one
    # lacks digits.
    "modulo": """
fn modulo(a: f32, b: f32) -> f32 {
    let x = bitcast<u32>(a) & 0x7fffffffu;
    let y = bitcast<u32>(b) & 0x7fffffffu;
    if (x >= 0x7f800000u || y > 0x7f800000u || y == 0u) { return nan(); }
    if (x < y) { return a; }
    let exponent = max(y >> 23u, 1u);
    let divisor = (y & 0x7fffffu) | select(0u, 0x800000u, y > 0x7fffffu);
    var rest = ((x & 0x7fffffu) | select(0u, 0x800000u, x > 0x7fffffu)) % divisor;
    var shift = max(x >> 23u, 1u) - exponent;
    while (shift > 0u) {
        let bits = min(shift, 8u);
        rest = (rest << bits) % divisor;
        shift -= bits;
    }
    if (rest == 0u) { return bitcast<f32>(bitcast<u32>(a) & 0x80000000u); }
    let moved = min(countLeadingZeros(rest) - 8u, exponent - 1u);
    let significand = rest << moved;
    let size = select(significand, ((exponent - moved) << 23u) | (significand & 0x7fffffu),
        significand > 0x7fffffu);
    return bitcast<f32>(size | (bitcast<u32>(a) & 0x80000000u));
}
""",
    # As Python's %, with the sign of b.
    "remainder_f32": """
fn remainder_f32(a: f32, b: f32) -> f32 {
    let rest = modulo(a, b);
    return select(rest, rest + b, rest != 0.0 && (rest < 0.0) != (b < 0.0));
}
""",
    # `a - modulo(a, b)` is a multiple of b, so up to rounding the quotient is an integer.
    "trunc_divide_f32": """
fn trunc_divide_f32(a: f32, b: f32) -> f32 {
    let quotient = a / b;
    let found = round((a - modulo(a, b)) / b);
    return select(found, quotient, b == 0.0 || is_infinite(quotient) || is_infinite(b));
}
""",
    "floor_divide_f32": """
fn floor_divide_f32(a: f32, b: f32) -> f32 {
    let rest = modulo(a, b);
    let found = select(trunc_divide_f32(a, b), nan(), is_infinite(a) && b != 0.0);
    return select(found, found - 1.0, rest != 0.0 && (rest < 0.0) != (b < 0.0));
}
""",
    "random_bits": _random_bits(),
    # Without `%`, which Vulkan defines for negative operands only since maintenance8.
    "floor_divide_i32": """
fn floor_divide_i32(a: i32, b: i32) -> i32 {
    let quotient = a / b;
    return select(quotient, quotient - 1, a != quotient * b && (a < 0) != (b < 0));
}
""",
}


def functions_of(text: str) -> list[str]:
    """Return the functions that `text` calls, directly or indirectly, each once."""
    called: list[str] = []
    for name, function in reversed(FUNCTIONS.items()):
        if re.search(rf"\b{name}\(", text):
            called.insert(0, function.strip())
            text += function
    return called


def literal(value: float | int | bool, dtype: str) -> str:
    """Return `value` as WGSL, rounded to `dtype`; OverflowError if it doesn't fit into an i32.

    Negative numbers are in brackets, since WGSL parses `--` as a decrement.
    """
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "i32":
        if not -(2**31) <= int(value) < 2**31:
            raise OverflowError(f"{int(value)} does not fit into 32 bits")
        if int(value) == -(2**31):
            return "(-2147483647 - 1)"
        return f"{int(value)}" if value >= 0 else f"({int(value)})"
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if math.isnan(rounded):
        return "nan()"
    if math.isinf(rounded):
        return "infinity()" if rounded > 0 else "(-infinity())"
    text = repr(rounded)
    return f"({text}f)" if text.startswith("-") else f"{text}f"
