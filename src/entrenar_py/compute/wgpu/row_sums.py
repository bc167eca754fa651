"""Adds rows to those rows of a tensor that an index selects, without atomics."""

from __future__ import annotations

from entrenar_py.compute.wgpu.codegen import Shader, thread_shader
from entrenar_py.compute.wgpu.emitter import Buffer
from entrenar_py.compute.wgpu.values import Schedule, Stored, Value


def add_rows(schedule: Schedule, value: Value, ids: Value, rows: Value) -> Value:
    """Return a copy of `value` [n, c] with `rows` [r, c] added, in order, to its rows `ids` [r].

    Ids out of range are ignored. A small kernel links equal ids into chains. The threads of a
    chain's first id add the whole chain, so no two threads write to one element.
    """
    listed, added = schedule.contiguous(ids), schedule.contiguous(rows)
    copied = schedule.copy(value)
    chain = schedule.buffer("i32", ids.size)
    workgroups_max = schedule.limits.workgroups_max
    schedule.add(_chain_kernel(listed, chain, workgroups_max))
    sizes = (value.shape[0], *rows.shape)
    schedule.add(
        _rows_kernel(listed, added, schedule.strided(copied), chain, sizes, workgroups_max)
    )
    return copied


def _chain_kernel(ids: Stored, chain: Buffer, workgroups_max: int) -> Shader:
    body = f"""\
let id = ids[{ids.offset} + i];
var first = true;
for (var j = 0; j < i; j++) {{
    if (ids[{ids.offset} + j] == id) {{ first = false; break; }}
}}
var next = i + 1;
for (; next < {chain.size}; next++) {{
    if (ids[{ids.offset} + next] == id) {{ break; }}
}}
// A negative sign marks an id that is not the first of its chain. next is at least 1.
chain[i] = select(-next, next, first);"""
    buffers = {ids.buffer: "ids", chain: "chain"}
    return thread_shader(buffers, body.splitlines(), chain.size, workgroups_max=workgroups_max)


def _rows_kernel(
    ids: Stored,
    rows: Stored,
    out: Stored,
    chain: Buffer,
    sizes: tuple[int, ...],
    workgroups_max: int,
) -> Shader:
    num_rows, count, width = sizes
    body = f"""\
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
    buffers = {ids.buffer: "ids", chain: "chain", rows.buffer: "rows", out.buffer: "out"}
    return thread_shader(buffers, body.splitlines(), count * width, workgroups_max=workgroups_max)
