"""The sums of a sketch (`sketches`) on a GPU: one launch for all tensors, memory read once.

Needs Triton. Under `TRITON_INTERPRET=1` the kernels run on the CPU, where they are compared with
`sketches.sketch`. Sums are made in a fixed order, so a sketch has the same bits in every run.
"""

# The types of a kernel are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from entrenar_py.shared.trace import tensors

ROW = tl.constexpr(tensors.PROJECTIONS)  # elements; also the numbers of a projection
SAMPLES = tl.constexpr(tensors.SAMPLES)
SUMS = tl.constexpr(tensors.PROJECTIONS + 1)  # the projection and the sum of squares
NUMBERS = tl.constexpr(tensors.PROJECTIONS + 1 + tensors.SAMPLES)  # of a sketch


@triton.jit
def _mixed(number):  # uint32 -> uint32, as `sketches.mixed`
    number ^= number >> 16
    number *= tl.cast(0x7FEB352D, tl.uint32)
    number ^= number >> 15
    number *= tl.cast(0x846CA68B, tl.uint32)
    return number ^ (number >> 16)


@triton.jit
def project(
    tables,  # int64 [tensors, 3]: address, place in the whole tensor, number of elements
    owner,  # int32 [chunks]: index of the tensor
    first_row,  # int64 [chunks], in the whole tensor
    out,  # float64 [chunks, SUMS]
    dtype: tl.constexpr,
    rows: tl.constexpr,  # of a chunk
    tile: tl.constexpr,  # rows that are read at once
):
    chunk = tl.program_id(0)
    index = tl.load(owner + chunk)
    source = tl.load(tables + 3 * index).to(tl.pointer_type(dtype), bitcast=True)
    place = tl.load(tables + 3 * index + 1)
    count = tl.load(tables + 3 * index + 2)
    begin = tl.load(first_row + chunk)
    # Offsets in the chunk fit in 32 bits; so do the bounds of the tensor as seen from there.
    source += begin * ROW - place
    size: tl.constexpr = rows * ROW
    low = tl.minimum(tl.maximum(place - begin * ROW, 0), size).to(tl.int32)
    high = tl.minimum(tl.maximum(place + count - begin * ROW, 0), size).to(tl.int32)
    above = _mixed((begin >> 32).to(tl.uint32))  # a chunk never crosses 2^32 rows
    bucket = tl.arange(0, ROW)[None, :]
    sums = tl.zeros([tile, ROW], tl.float64)
    squares = tl.zeros([tile, ROW], tl.float64)
    for at in range(0, rows, tile):
        inside = at + tl.arange(0, tile)[:, None]
        drawn = _mixed(above ^ (begin + inside).to(tl.uint32))
        column = bucket ^ (_mixed(drawn) % ROW).to(tl.int32)
        offset = inside * ROW + column
        held = (offset >= low) & (offset < high)
        element = tl.load(source + offset, mask=held, other=0.0).to(tl.float64)
        minus = ((drawn >> column.to(tl.uint32)) & 1) != 0
        sums += tl.where(minus, -element, element)
        squares += element * element
    tl.store(out + chunk * SUMS + tl.arange(0, ROW), tl.sum(sums, axis=0))
    tl.store(out + chunk * SUMS + ROW, tl.sum(squares))


@triton.jit
def finish(
    tables,  # int64 [tensors, 3], as in `project`
    samples,  # int64 [tensors, SAMPLES]: places in the whole tensor, -1 for none
    ends,  # int64 [tensors + 1]: the chunks of tensor t are ends[t] to ends[t + 1] - 1
    sums,  # float64 [chunks, SUMS]
    out,  # float64 [tensors, NUMBERS]: sum of squares, projection, samples
    dtype: tl.constexpr,
    batch: tl.constexpr,  # chunks that are added at once
):
    index = tl.program_id(0)
    bucket = tl.arange(0, ROW)
    total = tl.zeros([batch, ROW], tl.float64)
    square = tl.zeros([batch], tl.float64)
    end = tl.load(ends + index + 1)
    for begin in range(tl.load(ends + index), end, batch):
        chunk = begin + tl.arange(0, batch)
        there = chunk < end
        place = chunk[:, None] * SUMS + bucket[None, :]
        total += tl.load(sums + place, mask=there[:, None], other=0.0)
        square += tl.load(sums + chunk * SUMS + ROW, mask=there, other=0.0)
    row = out + index * NUMBERS
    tl.store(row, tl.sum(square))
    tl.store(row + 1 + bucket, tl.sum(total, axis=0))
    source = tl.load(tables + 3 * index).to(tl.pointer_type(dtype), bitcast=True)
    place = tl.load(tables + 3 * index + 1)
    count = tl.load(tables + 3 * index + 2)
    which = tl.arange(0, SAMPLES)
    wanted = tl.load(samples + index * SAMPLES + which)
    local = wanted - place
    held = (wanted >= 0) & (local >= 0) & (local < count)
    sampled = tl.load(source + local, mask=held, other=0.0).to(tl.float64)
    tl.store(row + 1 + ROW + which, sampled)
