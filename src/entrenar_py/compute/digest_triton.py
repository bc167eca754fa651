"""Triton kernels for the digests of tensors on a GPU, and for the sums of their sketches.

All chunks of all tensors are hashed in one launch, and memory is read once. With
`TRITON_INTERPRET=1` the kernels run on the CPU, where digests are compared bit for bit with xxhash,
and sketches with `sketches.sketch`.

A digest is the XXH3-128 hash of chunks (`digest.DigestTable` defines the chunks). Four threads hash
one chunk, each with two of XXH3's eight lanes, so each load has 16 bytes. Threads exchange nothing
before the end: the neighbouring word that a lane adds is in the same thread.

For chunk c, with w = the words of c padded with zeros, the kernel writes
    xxhash.xxh3_128_intdigest(w) at out[slot[c]] (low half), out[slot[c] + 1] (high half)
and sets the lowest bit of out[ROW_WORDS * tensor[c] + 2] if an element of c is NaN or Inf.

The sums of a sketch are added in a fixed order, so a sketch has the same bits in every run.
"""

# The parameters of a kernel have types of Triton.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from entrenar_py.shared.trace import tensors

# Blocks per chunk, of 16 stripes of 8 words each. Lanes are scrambled after each but the last.
BLOCKS = tl.constexpr(8)
# Words of a tensor's row: low half, high half, flags, and one for the watch.
ROW_WORDS = tl.constexpr(4)
# Where the parts of the secret begin in the table (`digest.secrets`).
LAST_STRIPE, LOW, HIGH, START = tl.constexpr(24), tl.constexpr(32), tl.constexpr(40), 48
_START = tl.constexpr(START)
# Powers and primes of the specification of XXH3; the last two include the chunk's length.
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
LENGTH_LOW = tl.constexpr(8192 * 0x9E3779B185EBCA87 % 2**64)
LENGTH_HIGH = tl.constexpr((2**64 - 1) ^ (8192 * 0xC2B2AE3D27D4EB4F % 2**64))


@triton.jit
def _pairs(words):  # [chunks, 8] -> the even and the odd lanes, [chunks, 4] each
    return tl.split(tl.reshape(words, [words.shape[0], 4, 2]))


@triton.jit
def _times(keyed):  # the product of its halves, as XXH3 accumulates it
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _scramble(lane, key):
    return ((lane ^ (lane >> 47)) ^ key) * tl.cast(PRIME32_1, tl.uint64)


@triton.jit
def _merge(even, odd, secret, at, start):  # [chunks, 4] lanes -> [chunks]
    pair = 2 * tl.arange(0, 4)[None, :]
    a = even ^ tl.load(secret + at + pair).to(tl.uint64, bitcast=True)
    b = odd ^ tl.load(secret + at + 1 + pair).to(tl.uint64, bitcast=True)
    mixed = tl.sum((a * b) ^ tl.umulhi(a, b), axis=1) + start
    mixed = (mixed ^ (mixed >> 37)) * tl.cast(PRIME_MX1, tl.uint64)
    return mixed ^ (mixed >> 32)


@triton.jit(do_not_specialize=["num_chunks"])  # one kernel for all levels
def hash_chunks(
    address,  # int64 [chunks], of 16 bytes' alignment
    num_words,  # int32 [chunks]: number of words in the chunk, even
    tensor,  # int32 [chunks]
    slot,  # int32 [chunks]: where in `out` its digest goes
    kinds,  # int64 [tensors, 3]: exponent bits, the lowest of each, what a carry sets
    secret,  # int64 [56]
    out,  # int64
    num_chunks,
    per_program: tl.constexpr,  # chunks per program, with 4 threads each
):
    chunk = tl.program_id(0) * per_program + tl.arange(0, per_program)
    here = chunk < num_chunks
    base = tl.multiple_of(tl.load(address + chunk, mask=here, other=0), 16)
    base = base.to(tl.pointer_type(tl.int64), bitcast=True)[:, None]
    limit = tl.multiple_of(tl.load(num_words + chunk, mask=here, other=0), 2)[:, None]
    owner = tl.load(tensor + chunk, mask=here, other=0)
    exponent = tl.load(kinds + 3 * owner).to(tl.uint64, bitcast=True)[:, None]
    carry = tl.load(kinds + 3 * owner + 1).to(tl.uint64, bitcast=True)[:, None]
    top = tl.load(kinds + 3 * owner + 2).to(tl.uint64, bitcast=True)[:, None]

    lane = tl.arange(0, 8)[None, :]
    pair = 2 * tl.arange(0, 4)[None, :]
    zero = tl.zeros([per_program, 4], tl.uint64)
    even = zero + tl.load(secret + _START + pair).to(tl.uint64, bitcast=True)
    odd = zero + tl.load(secret + _START + 1 + pair).to(tl.uint64, bitcast=True)
    bad = zero

    for block in range(BLOCKS):
        for stripe in tl.static_range(16):
            at = 8 * (16 * block + stripe) + lane
            place = tl.multiple_of(base + at, (1, 16))
            words = tl.load(place, mask=at < limit, other=0).to(tl.uint64, bitcast=True)
            a, b = _pairs(words)
            bad |= ((a & exponent) + carry) | ((b & exponent) + carry)
            # The last stripe has a separate key. (A condition isn't needed: all chunks do the
            # same.)
            key = stripe + (stripe // 15) * (block // (BLOCKS - 1)) * (LAST_STRIPE - 15)
            even_key = tl.load(secret + key + pair).to(tl.uint64, bitcast=True)
            odd_key = tl.load(secret + key + 1 + pair).to(tl.uint64, bitcast=True)
            even += _times(a ^ even_key) + b
            odd += _times(b ^ odd_key) + a
        if block < BLOCKS - 1:
            even = _scramble(even, tl.load(secret + 16 + pair).to(tl.uint64, bitcast=True))
            odd = _scramble(odd, tl.load(secret + 17 + pair).to(tl.uint64, bitcast=True))

    low = _merge(even, odd, secret, LOW, tl.cast(LENGTH_LOW, tl.uint64))
    high = _merge(even, odd, secret, HIGH, tl.cast(LENGTH_HIGH, tl.uint64))
    to = out + tl.load(slot + chunk, mask=here, other=0)
    tl.store(to, low.to(tl.int64, bitcast=True), mask=here)
    tl.store(to + 1, high.to(tl.int64, bitcast=True), mask=here)
    flagged = tl.max(((bad & top) != 0).to(tl.int32), axis=1) != 0
    tl.atomic_or(out + owner * ROW_WORDS + 2, 1, mask=here & flagged, sem="relaxed")


ROW = tl.constexpr(tensors.PROJECTIONS)  # elements; also the numbers of a projection
SAMPLES = tl.constexpr(tensors.SAMPLES)
SUMS = tl.constexpr(tensors.PROJECTIONS + 1)  # the projection and the sum of squares
NUMBERS = tl.constexpr(tensors.PROJECTIONS + 1 + tensors.SAMPLES)  # length of a sketch


@triton.jit
def _mixed(number):  # uint32 -> uint32, as `sketches.mixed`
    number ^= number >> 16
    number *= tl.cast(0x7FEB352D, tl.uint32)
    number ^= number >> 15
    number *= tl.cast(0x846CA68B, tl.uint32)
    return number ^ (number >> 16)


@triton.jit
def project_sketch(
    tables,  # int64 [tensors, 3]: address, place in the whole tensor, number of elements
    owner,  # int32 [chunks]: index of the tensor
    first_row,  # int64 [chunks], in the whole tensor
    out,  # float64 [chunks, SUMS]
    dtype: tl.constexpr,
    rows: tl.constexpr,  # rows per chunk
    tile: tl.constexpr,  # rows that are read at once
):
    chunk = tl.program_id(0)
    index = tl.load(owner + chunk)
    source = tl.load(tables + 3 * index).to(tl.pointer_type(dtype), bitcast=True)
    place = tl.load(tables + 3 * index + 1)
    count = tl.load(tables + 3 * index + 2)
    begin = tl.load(first_row + chunk)
    # Offsets in the chunk fit in 32 bits; so do the bounds of the tensor relative to the chunk.
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
def finish_sketch(
    tables,  # int64 [tensors, 3], as in `project_sketch`
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
