"""Rows added to the rows of a tensor that data names, several to one, without atomics."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.backends.wgpu.codegen import THREADS, Shader
from entrenar_py.backends.wgpu.emitter import Buffer
from entrenar_py.backends.wgpu.values import Schedule, Stored, Value


def add_rows(schedule: Schedule, value: Value, ids: Value, rows: Value) -> Value:
    """A copy of `value` [n, c] with `rows` [r, c] added to its rows `ids` [r], in their order;
    those of ids that are in no row are added to none.

    Equal ids are chained by a small kernel; each first one adds up its chain, so that nothing is
    added to by two threads.
    """
    count, width = rows.shape
    listed, added = schedule.contiguous(ids), schedule.contiguous(rows)
    found = Value(
        value.shape, "f32", value.read, value.reads, value.cost, value.rows, value.product
    )
    out = schedule.realise(found).stored
    assert out is not None
    chain = schedule.buffer("i32", count)
    schedule.add(_chain_kernel(listed, chain, count, schedule.limits.workgroups_max))
    schedule.add(
        _rows_kernel(
            (listed, added, out),
            chain,
            (value.shape[0], count, width),
            schedule.limits.workgroups_max,
        )
    )
    return found


def _chain_kernel(ids: Stored, chain: Buffer, count: int, workgroups_max: int) -> Shader:
    body = f"""
    let id = ids[{ids.offset} + i];
    var first = true;
    for (var j = 0; j < i; j++) {{
        if (ids[{ids.offset} + j] == id) {{ first = false; break; }}
    }}
    var next = i + 1;
    for (; next < {count}; next++) {{
        if (ids[{ids.offset} + next] == id) {{ break; }}
    }}
    // next is at least 1, so its sign can say that an equal id stands before this one.
    chain[i] = select(-next, next, first);"""
    return _direct(
        [("ids", ids.buffer, "i32"), ("chain", chain, "i32")], body, count, workgroups_max
    )


def _rows_kernel(
    stored: tuple[Stored, Stored, Stored],
    chain: Buffer,
    sizes: tuple[int, int, int],
    workgroups_max: int,
) -> Shader:
    (ids, rows, out), (num_rows, count, width) = stored, sizes
    body = f"""
    var j = i / {width};
    let column = i % {width};
    let id = ids[{ids.offset} + j];
    if (chain[j] < 0 || id < 0 || id >= {num_rows}) {{ return; }}
    var sum = out[id * {width} + column];
    while (j < {count}) {{
        sum += rows[{rows.offset} + j * {width} + column];
        j = abs(chain[j]);
    }}
    out[id * {width} + column] = sum;"""
    names = [
        ("ids", ids.buffer, "i32"),
        ("chain", chain, "i32"),
        ("rows", rows.buffer, "f32"),
        ("out", out.buffer, "f32"),
    ]
    return _direct(names, body, count * width, workgroups_max)


def _direct(
    names: Sequence[tuple[str, Buffer, str]], body: str, size: int, workgroups_max: int
) -> Shader:
    """A kernel of `size` threads whose last buffer is written to."""
    groups = -(-size // THREADS)
    x = min(groups, workgroups_max)
    bindings = [
        f"@group(0) @binding({number}) "
        f"var<storage, {'read_write' if number == len(names) - 1 else 'read'}> "
        f"{name}: array<{dtype}>;\n"
        for number, (name, _, dtype) in enumerate(names)
    ]
    source = f"""{"".join(bindings)}
@compute @workgroup_size({THREADS})
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {{
    let i = (i32(group.y) * {x} + i32(group.x)) * {THREADS} + i32(local.x);
    if (i >= {size}) {{ return; }}{body}
}}
"""
    return Shader(source, (x, -(-groups // x), 1), tuple(buffer for _, buffer, _ in names))
