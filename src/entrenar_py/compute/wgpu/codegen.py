"""WGSL of all kernels but matrix products: one row per thread, or one row per workgroup.

In a thread kernel, each thread runs its loops alone, in order. In a row kernel, the lanes of a
workgroup share each loop: a lane folds every 64th (or 256th) element in order, then the lanes'
totals are folded along a fixed binary tree. Both give the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.emitter import STORAGE, Buffer, Emitter, Loop, Statement
from entrenar_py.compute.wgpu.index import Atom, Index
from entrenar_py.compute.wgpu.intrinsics import functions_of

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
    """Return a kernel, one row a thread. `value` is a row's one element, "" if loops write rows."""
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
    """Convert `value` to its type in memory, which is u32 for bool."""
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
    loop: Loop,
    indices: Sequence[Index],
    rows: Callable[[Index], Index],
    out: Buffer,
    lanes: int,
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
    """Merge neighbouring loop variables that every index steps through as if they were one.

    Return the function that rewrites an index, and the code that computes the variables.
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
