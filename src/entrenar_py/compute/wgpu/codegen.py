"""The WGSL of all kernels except matrix products: one row per thread, or one per workgroup.

In a thread kernel, each thread runs its loops alone, in order. In a row kernel, the lanes of a
workgroup share each loop: a lane folds every 64th (or 256th) element in order, then the lanes'
totals are folded along a fixed binary tree. Both give the same bits in every run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from entrenar_py.compute import draws, nf4
from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.emitter import STORAGE, Buffer, Emitter, Loop, Statement
from entrenar_py.compute.wgpu.index import Atom, Index

# WGSL functions that kernels call where the built-in ones are missing or inaccurate; literals.
#
# WGSL has no literals for infinity and NaN, and compilers may assume that neither occurs. Kernels
# get both from the bits of a variable, which compilers don't evaluate.


def _nf4_level() -> str:
    choices = [f"{level!r}f" for level in nf4.LEVELS]
    for bit in range(4):
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [f"select({one}, {other}, bit_{bit})" for one, other in pairs]
    bits = [f"    let bit_{bit} = (code & {1 << bit}u) != 0u;" for bit in range(4)]
    lines = ["", "fn nf4_level(code: u32) -> f32 {", *bits, f"    return {choices[0]};", "}", ""]
    return "\n".join(lines)


def _random_bits() -> str:
    """Return the WGSL of `draws.threefry` for one element, which is one word of a pair."""
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


FUNCTIONS = {  # in order: a function comes after the functions that it calls
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
    """Return `value` as WGSL, rounded to `dtype`. Raises OverflowError if too large for an i32.

    Negative numbers are in parentheses, because WGSL parses `--` as a decrement.
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


THREADS = 64
LANES_MIN, LANES_MAX = 64, 256  # every WebGPU device has 256
LONG_LOOP = 512


@dataclass(frozen=True)
class Shader:
    """A compute shader with the entry point `main`. Binding i of group 0 is `buffers[i]`.

    Only the last binding is written to.
    """

    source: str
    workgroups: tuple[int, int, int]
    buffers: tuple[Buffer, ...]


def thread_kernel(emitter: Emitter, value: str, out: Buffer, *, workgroups_max: int) -> Shader:
    """Return a kernel of one row per thread.

    `value` is a row's only element, "" if loops write the rows.
    """
    size = math.prod(emitter.rows)
    body = [
        *_body(emitter, out, lanes=1),
        *([f"out[i] = {_number(value, out.dtype)};"] if value else []),
    ]
    buffers = {**emitter.buffers, out: "out"}
    return thread_shader(buffers, body, size, workgroups_max=workgroups_max)


def thread_shader(
    buffers: dict[Buffer, str], body: Sequence[str], size: int, *, workgroups_max: int
) -> Shader:
    """Return a kernel in which `size` threads run `body`, each with its own index as `i`."""
    groups = -(-size // THREADS)
    x = min(groups, workgroups_max)
    start = [
        f"let i = (i32(group.y) * {x} + i32(group.x)) * {THREADS} + i32(local.x);",
        f"if (i >= {size}) {{ return; }}",
    ]
    return _shader(buffers, [*start, *body], (x, -(-groups // x), 1), THREADS)


def row_kernel(emitter: Emitter, value: str, out: Buffer, *, workgroups_max: int) -> Shader:
    """Return a kernel of one row per workgroup, with `value` as in `thread_kernel`."""
    size = math.prod(emitter.rows)
    longest = max(item.size for item in emitter.body if isinstance(item, Loop))
    lanes = LANES_MAX if longest > LONG_LOOP else LANES_MIN
    x = min(size, workgroups_max)
    body = [
        f"let i = i32(group.y) * {x} + i32(group.x);",
        f"if (i >= {size}) {{ return; }}",
        "let lane = i32(local.x);",
        *_body(emitter, out, lanes=lanes),
        *([f"if (lane == 0) {{ out[i] = {_number(value, out.dtype)}; }}"] if value else []),
    ]
    return _shader({**emitter.buffers, out: "out"}, body, (x, -(-size // x), 1), lanes)


def epilogue(emitter: Emitter, value: str, first: int) -> str:
    """Return the `epilogue` for `product_kernel`: bindings, and a `finish` that returns `value`.

    `first` is the number of the first binding.
    """
    lines = _bindings(emitter.buffers, first)
    statements = _statements(emitter.body, lambda index: index)
    lines += functions_of("\n".join(statements))
    lines.append("fn finish(acc: f32, b: u32, m: u32, n: u32) -> f32 {")
    for variable, name in zip(emitter.variables, "bmn", strict=True):
        lines += [f"    let {atom.text} = i32({name});" for atom, _ in variable.terms]
    lines += [f"    {line}" for line in [*statements, f"return {value};"]]
    return "\n".join([*lines, "}"]) + "\n"


def _shader(
    buffers: dict[Buffer, str], body: Sequence[str], workgroups: tuple[int, int, int], threads: int
) -> Shader:
    text = "\n".join(f"    {line}" for line in body)
    lines = [
        *_bindings(buffers, 0, written=list(buffers)[-1]),
        *(
            f"var<workgroup> partial_{dtype}: array<{STORAGE[dtype]}, {threads}>;"
            for dtype in ("f32", "i32", "bool")
            if f"partial_{dtype}[" in text
        ),
        *functions_of(text),
        "",
        f"@compute @workgroup_size({threads})",
        "fn main(",
        "    @builtin(workgroup_id) group: vec3<u32>,",
        "    @builtin(local_invocation_id) local: vec3<u32>,",
        ") {",
        text,
        "}",
        "",
    ]
    return Shader("\n".join(lines), workgroups, tuple(buffers))


def _bindings(buffers: dict[Buffer, str], first: int, written: Buffer | None = None) -> list[str]:
    return [
        f"@group(0) @binding({number}) "
        f"var<storage, {'read_write' if buffer is written else 'read'}> "
        f"{name}: array<{STORAGE[buffer.dtype]}>;"
        for number, (buffer, name) in enumerate(buffers.items(), first)
    ]


def _number(value: str, dtype: str) -> str:
    """Return `value` converted to its type in memory, which is u32 for bool."""
    return f"select(0u, 1u, {value})" if dtype == "bool" else value


def _body(emitter: Emitter, out: Buffer, *, lanes: int) -> list[str]:
    """Return the statements and loops of a kernel. `lanes` threads share each loop."""
    indices = [one for item in emitter.body for index in _indices(item) for one in at.leaves(index)]
    change, lines = _merge(_atoms(emitter.variables), indices, "i")
    for item in emitter.body:
        if isinstance(item, Statement):
            lines += _statements([item], change)
        else:
            lines += _loop(item, indices, change, out, lanes)
    return lines


def _loop(
    loop: Loop, indices: Sequence[Index], rows: Callable[[Index], Index], out: Buffer, lanes: int
) -> list[str]:
    variable = f"c{loop.number}"
    columns, decoding = _merge(_atoms(loop.variables()), indices, variable)
    start = "lane" if lanes > 1 else "0"
    inside = [*decoding, *_statements(loop.body, lambda index: columns(rows(index)))]
    lines = []
    if loop.fold is None:
        inside.append(f"out[i * {loop.size} + {variable}] = {_number(loop.value, out.dtype)};")
    else:
        lines.append(f"var {loop.total}: {loop.fold.dtype} = {loop.fold.start};")
        combined = loop.fold.combine.format(loop.total, loop.value)
        inside.append(f"{loop.total} = {combined};")
    lines += [
        f"for (var {variable} = {start}; {variable} < {loop.size}; {variable} += {lanes}) {{",
        *(f"    {line}" for line in inside),
        "}",
    ]
    return lines + (_tree(loop, lanes) if lanes > 1 and loop.fold is not None else [])


def _tree(loop: Loop, lanes: int) -> list[str]:
    """Return the code that folds the lanes' totals and gives the result to all lanes.

    Workgroup memory holds bools as u32: as `bool`, an NVIDIA driver loses some of them.
    """
    assert loop.fold is not None
    partial = f"partial_{loop.fold.dtype}"
    combined = loop.fold.combine.format(f"{partial}[lane]", f"{partial}[lane + half]")
    return [
        f"{partial}[lane] = {_number(loop.total, loop.fold.dtype)};",
        "workgroupBarrier();",
        f"for (var half = {lanes // 2}; half > 0; half /= 2) {{",
        f"    if (lane < half) {{ {partial}[lane] = {combined}; }}",
        "    workgroupBarrier();",
        "}",
        f"{loop.total} = {loop.fold.dtype}({partial}[0]);",
        "workgroupBarrier();",
    ]


def _statements(items: Iterable[Statement | Loop], change: Callable[[Index], Index]) -> list[str]:
    lines = []
    for item in items:
        assert isinstance(item, Statement)
        places = {f"i{n}": at.render(change(one)) for n, one in enumerate(item.indices)}
        lines.append(f"let {item.name} = {item.template.format(*item.names, **places)};")
    return lines


def _indices(item: Statement | Loop) -> list[Index]:
    if isinstance(item, Statement):
        return list(item.indices)
    return [index for one in item.body for index in one.indices]


def _atoms(variables: Sequence[Index]) -> list[Atom]:
    return [atom for variable in variables for atom, _ in variable.terms]


def _merge(
    atoms: Sequence[Atom], indices: Sequence[Index], position: str
) -> tuple[Callable[[Index], Index], list[str]]:
    """Merge adjacent loop variables that all indices traverse like a single variable.

    Returns the function that rewrites an index, and the code that computes the variables.
    """
    groups: list[list[Atom]] = []
    coefficients = [dict(index.terms) for index in indices]
    for atom in atoms:
        last = groups[-1][-1] if groups else None
        if last is not None and all(
            found.get(last, 0) == found.get(atom, 0) * atom.size for found in coefficients
        ):
            groups[-1].append(atom)
        else:
            groups.append([atom])
    sizes = [math.prod(atom.size for atom in group) for group in groups]
    table: dict[Atom, Index] = {}
    lines = []
    for number, group in enumerate(groups):
        name = position if len(groups) == 1 else group[-1].text
        whole = Index(0, ((Atom(name, sizes[number], group[-1].level), 1),))
        table |= dict.fromkeys(group, Index(0)) | {group[-1]: whole}
        if len(groups) > 1:
            stride = math.prod(sizes[number + 1 :])
            text = f"{position} / {stride}" if stride > 1 else position
            lines.append(f"let {name} = {f'({text}) % {sizes[number]}' if number else text};")

    def change(index: Index) -> Index:
        return at.substitute(index, lambda atom: table.get(atom, Index(0, ((atom, 1),))))

    return change, lines
