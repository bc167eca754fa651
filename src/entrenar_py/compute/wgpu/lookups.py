"""Operations that select elements by indices or bounds: lookups, joins, overlays, scatters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu import pointwise, values
from entrenar_py.compute.wgpu.codegen import Shader, thread_shader
from entrenar_py.compute.wgpu.emitter import Buffer, Emitter
from entrenar_py.compute.wgpu.index import Index, Indices
from entrenar_py.compute.wgpu.values import CHEAP, Schedule, Stored, Value


def add_rows(schedule: Schedule, value: Value, ids: Value, rows: Value) -> Value:
    """Return a copy of `value` [n, c] with `rows` [r, c] added, in order, to its rows `ids` [r].

    Ids out of range are ignored. A small kernel links equal ids into chains. The threads of a
    chain's first id add the whole chain, so no two threads write to the same element.
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


_PIECES_MAX = 6  # tensors that one kernel joins
_UNROLLED_MAX = 4


def look_up(
    schedule: Schedule,
    value: Value,
    indices: dict[int, Value],
    shape: Sequence[int],
    first: int,
    *,
    wraps: bool = False,
) -> Value:
    """Return the elements of `value` at `indices`, a dict of dim -> indices along this dim.

    Indices have the same rank and are broadcast. Their dims begin at dim `first` of the result,
    between the remaining dims of `value`. In float32, indices out of range give NaN. If `wraps`,
    negative indices count from the end.
    """
    _settle(schedule, value)
    for index in indices.values():
        _settle(schedule, index)
    schedule.make_room([value, *indices.values()], 4 * len(indices))
    num_looked = len(next(iter(indices.values())).shape)
    recipe = value.read
    ids = {dim: (index.read, index.shape) for dim, index in indices.items()}

    def read(emitter: Emitter, wanted: Indices) -> str:
        inner = wanted[first : first + num_looked]
        around = list(wanted[:first] + wanted[first + num_looked :])
        places, wrong = [], []
        for dim, size in enumerate(value.shape):
            if dim not in ids:
                places.append(around.pop(0))
                continue
            number, own = ids[dim]
            raw = number(emitter, values.broadcast(inner, own))
            raw = emitter.op(wrapped(size), raw) if wraps else raw
            place, outside = _position(emitter, raw, size)
            places.append(place)
            wrong.append(outside)
        text = recipe(emitter, tuple(places))
        for one_wrong in wrong if value.dtype == "f32" else ():
            text = emitter.op("select({0}, nan(), {1})", text, one_wrong)
        return text

    return _recipe([value, *indices.values()], shape, value.dtype, read, 4 * len(indices))


def gather(schedule: Schedule, value: Value, dim: int, index: Value) -> Value:
    """Gather along `dim` as `torch.gather`, with NaN (float32 only) for indices out of range."""
    dim %= max(1, len(value.shape))
    for one in (value, index):
        _settle(schedule, one)
    schedule.make_room([value, index], 4)
    recipe, number = value.read, index.read

    def read(emitter: Emitter, indices: Indices) -> str:
        place, wrong = _position(emitter, number(emitter, indices), value.shape[dim])
        text = recipe(emitter, (*indices[:dim], place, *indices[dim + 1 :]))
        return emitter.op("select({0}, nan(), {1})", text, wrong) if value.dtype == "f32" else text

    return _recipe([value, index], index.shape, value.dtype, read, 4)


def _position(emitter: Emitter, raw: str, size: int) -> tuple[Index, str]:
    """Return the i32 value `raw` as a clamped index, and the name of its out-of-range flag."""
    wrong = emitter.op(f"{{0}} < 0 || {{0}} >= {size}", raw)
    inside = emitter.op(f"clamp({{0}}, 0, {size - 1})", raw)
    return emitter.position(inside, size), wrong


def wrapped(size: int) -> str:
    """Return WGSL that makes a negative index count from the end."""
    return f"select({{0}}, {{0}} + {size}, {{0}} < 0)"


def join(schedule: Schedule, values: Sequence[Value], dim: int) -> Value:
    """Concatenate `values` along `dim`."""
    dim %= max(1, len(values[0].shape))
    while len(values) > _PIECES_MAX:
        groups = [values[i : i + _PIECES_MAX] for i in range(0, len(values), _PIECES_MAX)]
        values = [schedule.realise(join(schedule, group, dim)) for group in groups]
    if len(values) == 1:
        return values[0]
    total = sum(piece.shape[dim] for piece in values)
    shape = (*values[0].shape[:dim], total, *values[0].shape[dim + 1 :])
    for piece in values:
        _settle(schedule, piece)
    # From the last to the first: each value is placed before those already joined.
    start = total - values[-1].shape[dim]
    joined = _shifted(values[-1], dim, start, shape)
    for piece in reversed(values[:-1]):
        start -= piece.shape[dim]
        joined = _lay(schedule, joined, piece, dim, start, 1)
    return joined


def _shifted(value: Value, dim: int, start: int, shape: Sequence[int]) -> Value:
    """Return a tensor of `shape`: `value` from `start` on along `dim`, and undefined elsewhere."""
    recipe = value.read

    def read(emitter: Emitter, indices: Indices) -> str:
        place, _ = _within(emitter, indices[dim], start, value.shape[dim], 1)
        return recipe(emitter, (*indices[:dim], place, *indices[dim + 1 :]))

    return _recipe([value], shape, value.dtype, read, 2)


def overlay(
    schedule: Schedule, below: Value, above: Value, dim: int, start: int, step: int
) -> Value:
    """Return `below` with `above` at every `step`-th index from `start` on along `dim`."""
    for one in (below, above):
        _settle(schedule, one)
    return _lay(schedule, below, above, dim, start, step)


def _lay(schedule: Schedule, below: Value, above: Value, dim: int, start: int, step: int) -> Value:
    """Do `overlay` without storing expensive operands first."""
    schedule.make_room([above, below], 3)
    upper, lower = above.read, below.read

    def read(emitter: Emitter, indices: Indices) -> str:
        place, inside = _within(emitter, indices[dim], start, above.shape[dim], step)
        first = upper(emitter, (*indices[:dim], place, *indices[dim + 1 :]))
        if inside == "true":
            return first
        return emitter.op("select({1}, {0}, {2})", first, lower(emitter, indices), inside)

    return _recipe([above, below], below.shape, above.dtype, read, 3)


def _within(emitter: Emitter, index: Index, start: int, size: int, step: int) -> tuple[Index, str]:
    """Return i with `index` = start + i * step, clamped, and the name of its in-range flag."""
    shifted = index + Index(-start)
    low, high = shifted.bounds
    if step == 1 and low >= 0 and high < size:
        return shifted, "true"
    moved = emitter.number(shifted, "i32")
    inside = f"{{0}} >= 0 && {{0}} < {size * step}" + (
        f" && {{0}} % {step} == 0" if step > 1 else ""
    )
    place = emitter.op(f"clamp({{0}} / {step}, 0, {size - 1})", moved)
    return emitter.position(place, size), emitter.op(inside, moved)


def pad(schedule: Schedule, value: Value, widths: Sequence[int], filler: float = 0) -> Value:
    """Return `value` padded with `filler`. `widths` has (before, after), from the last dim on."""
    for number in range(len(widths) // 2):
        dim = len(value.shape) - 1 - number
        before, after = widths[2 * number : 2 * number + 2]
        start, end = max(0, -before), value.shape[dim] - max(0, -after)
        value = values.take(schedule, value, dim, start, end - start, 1)
        before, after = max(0, before), max(0, after)
        if before or after:
            size = value.shape[dim] + before + after
            shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
            below = pointwise.constant(filler, value.dtype, shape)
            value = overlay(schedule, below, value, dim, before, 1)
    return value


def scatter(
    schedule: Schedule, value: Value, dim: int, index: Value, source: Value, *, add: bool
) -> Value:
    """Return `value` with `source` written, or added in order, at `index` along `dim`.

    `source` has the shape of `index`. The last of several writes to the same element counts. Each
    element of the result reads all indices along `dim`, so this is for an `index` that is short
    along this dim.
    """
    for one in (value, index, source):
        _settle(schedule, one)
    count = index.shape[dim]
    if count > _UNROLLED_MAX:
        return _scatter_many(schedule, value, dim, index, source, add=add)
    schedule.make_room([value, index, source], 4 * count)
    below, pointed, above = value.read, index.read, source.read

    def read(emitter: Emitter, indices: Indices) -> str:
        text = below(emitter, indices)
        here = emitter.number(indices[dim], "i32")
        for number in range(count):
            place = (*indices[:dim], Index(number), *indices[dim + 1 :])
            hit = emitter.op("{0} == {1}", pointed(emitter, place), here)
            element = above(emitter, values.broadcast(place, source.shape))
            element = emitter.op("{0} + {1}", text, element) if add else element
            text = emitter.op("select({1}, {0}, {2})", element, text, hit)
        return text

    return _recipe([value, index, source], value.shape, value.dtype, read, 4 * count)


def _scatter_many(
    schedule: Schedule, value: Value, dim: int, index: Value, source: Value, *, add: bool
) -> Value:
    """Do `scatter` with a loop over the index: add an element's sources, or take the last one."""
    for one in (value, index, source):
        schedule.realise(one)
    count, rank = index.shape[dim], len(value.shape)
    square = (*value.shape, count)

    def spread(operand: Value) -> Value:
        last = [*(d for d in range(rank) if d != dim), dim]
        turned = values.permute(schedule, values.expand(schedule, operand, index.shape), last)
        shape = [1 if d == dim else value.shape[d] for d in range(rank)]
        return values.expand(schedule, values.reshape(schedule, turned, [*shape, count]), square)

    here = pointwise.counting(0, 1, square, dim, "i32")
    hit = pointwise.fuse(schedule, "{0} == {1}", [spread(index), here], square, "bool")
    if add:
        terms = pointwise.where(schedule, hit, spread(source), 0)
        fold = pointwise.FOLDS["sum", value.dtype]
        total = pointwise.reduce(schedule, terms, fold, [-1], keepdim=False)
        return pointwise.fuse(schedule, "{0} + {1}", [value, total], value.shape, value.dtype)
    numbers = pointwise.where(schedule, hit, pointwise.counting(0, 1, square, rank, "i32"), -1)
    fold = pointwise.FOLDS["amax", "i32"]
    last = schedule.realise(pointwise.reduce(schedule, numbers, fold, [-1], keepdim=False))
    zero = pointwise.constant(0, "i32")
    known = pointwise.fuse(schedule, "max({0}, {1})", [last, zero], value.shape, "i32")
    chosen = gather(schedule, values.expand(schedule, source, index.shape), dim, known)
    missing = pointwise.fuse(schedule, "{0} < 0", [last], value.shape, "bool")
    return pointwise.where(schedule, missing, value, chosen)


def _settle(schedule: Schedule, value: Value) -> None:
    """Store `value` if it is pending or expensive: a lookup may compute an element many times."""
    if value.pending or value.cost > 4 * CHEAP:
        schedule.realise(value)


def _recipe(
    values: Sequence[Value],
    shape: Sequence[int],
    dtype: str,
    read: Callable[[Emitter, Indices], str],
    cost: int,
) -> Value:
    reads = frozenset().union(*(one.reads for one in values))
    return Value(tuple(shape), dtype, read, reads, cost + sum(one.cost for one in values))


def flatten_index(schedule: Schedule, sizes: Sequence[int], indices: Sequence[Value]) -> Value:
    """Return one flat index in C order for `indices` into leading dims of the sizes `sizes`.

    Negative indices count from the end. If an index is out of range, the result is negative.
    """
    shape = np.broadcast_shapes(*(index.shape for index in indices))
    none = -math.prod(sizes)  # stays negative whatever the other dims add
    total: Value | None = None
    for index, size, stride in zip(indices, sizes, at.strides_of(sizes), strict=True):
        counted = pointwise.fuse(schedule, wrapped(size), [index], index.shape, "i32")
        inside = f"{{0}} >= 0 && {{0}} < {size}"
        placed = f"select({none}, {{0}} * {stride}, {inside})"
        term = pointwise.fuse(schedule, placed, [counted], shape, "i32", cost=2)
        if total is not None:
            term = pointwise.fuse(schedule, "{0} + {1}", [total, term], shape, "i32")
        total = term
    assert total is not None
    return values.reshape(schedule, total, [math.prod(shape)])
