"""The emitter of one kernel's WGSL. Each value is computed once, outside loops if possible.

Code that reads an element of a tensor requests loads, operations and sums from an `Emitter`, which
returns the name of each value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from entrenar_py.compute.nf4 import BLOCK, MEAN, NUM_SECOND_LEVELS, SECOND_BLOCK
from entrenar_py.compute.wgpu import index as at
from entrenar_py.compute.wgpu.index import ROW, Atom, Index

# WGSL has no bool in buffers, and nothing smaller than 32 bits.
STORAGE = {"f32": "f32", "i32": "i32", "bool": "u32", "u8": "u32", "bf16": "u32", "f16": "u32"}
ELEMENT_BYTES = 4
_PER_WORD = {"u8": 4, "bf16": 2, "f16": 2}  # elements of a u32, the first in its lowest bits
_DECODED = {  # {0} is the u32, shifted so that the element is in its lowest bits
    "u8": "i32({} & 255u)",
    "bf16": "bitcast<f32>({} << 16u)",
    "f16": "from_f16({} & 0xffffu)",
}


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory for a tensor in C order. `size` is in elements; kernels use none of size 0."""

    name: str
    dtype: str
    size: int

    @property
    def num_bytes(self) -> int:
        """The size in bytes, of whole words."""
        return -(-self.size // _PER_WORD.get(self.dtype, 1)) * ELEMENT_BYTES


@dataclass(frozen=True)
class Statement:
    """`let name = template`. `{0}` in the template stands for names[0], `{i0}` for indices[0]."""

    name: str
    template: str
    names: tuple[str, ...]
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class Fold:
    """A reduction. `combine` is WGSL for `{0}` and `{1}`, and `start` is its neutral element."""

    combine: str
    start: str
    dtype: str


@dataclass
class Loop:
    """A loop over the elements of `shape`. Folds `value` into `total`, or writes `value`."""

    number: int
    size: int
    shape: tuple[int, ...]
    body: list[Statement] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)
    fold: Fold | None = None
    value: str = ""
    total: str = ""

    def variables(self) -> at.Indices:
        """Return the loop variables, one for each dim of `shape`."""
        return tuple(
            at.variable(f"v{self.number}_{dim}", size, self.number)
            for dim, size in enumerate(self.shape)
        )


class Emitter:
    """A kernel in which each thread or workgroup computes one row.

    `rows` are the sizes of the result's leading dims, which select a row.
    In a product kernel's epilogue, the argument `acc` holds an element of `product`.
    """

    def __init__(self, rows: Sequence[int], *, product: object = None) -> None:
        self.rows = tuple(rows)
        self.variables = tuple(at.variable(f"r{dim}", size) for dim, size in enumerate(self.rows))
        self.product = product
        self.buffers: dict[Buffer, str] = {}
        self.body: list[Statement | Loop] = []
        self._memo: dict[object, str] = {}
        self._levels: dict[str, int] = {}
        self._loops: list[Loop] = []
        self._count = 0
        self._num_loops = 0

    # ---- for the code that reads elements

    def load(self, buffer: Buffer, index: Index) -> str:
        """Return the element of `buffer` at `index`, by name: f32 for 16-bit floats, i32 for u8."""
        slot = self.buffers.setdefault(buffer, f"in{len(self.buffers)}")
        if buffer.dtype in _PER_WORD:
            number = _PER_WORD[buffer.dtype]
            word = f"({slot}[{{i0}}] >> u32(({{i1}}) * {32 // number}))"
            places = index.divide(number), index.modulo(number)
            return self._let(_DECODED[buffer.dtype].format(word), (), places)
        text = f"{slot}[{{i0}}]"
        return self._let(f"{text} != 0u" if buffer.dtype == "bool" else text, (), (index,))

    def op(self, template: str, *names: str) -> str:
        """Return the name of a value computed from named values or literals."""
        return self._let(template, names, ())

    def number(self, index: Index, dtype: str) -> str:
        """Return the name of a value of `dtype` with the value of an index."""
        return self._let(f"{dtype}({{i0}})", (), (index,))

    def position(self, name: str, size: int) -> Index:
        """Return the i32 value `name`, which must be in `range(size)`, as an index."""
        if size == 1:
            return Index(0)
        return Index(0, ((Atom(name, size, self._levels.get(name, ROW)), 1),))

    def reduce(
        self, key: object, fold: Fold, shape: Sequence[int], body: Callable[[at.Indices], str]
    ) -> str:
        """Return the name of `body` folded over all indices of `shape`.

        The result is reused for the same `key`.
        """
        if key in self._memo:
            return self._memo[key]
        loop = self._open(shape)
        loop.fold, loop.value = fold, body(loop.variables())
        loop.total = self._memo[key] = f"s{loop.number}"
        self._close(loop)
        return loop.total

    def columns(self, shape: Sequence[int], body: Callable[[at.Indices], str]) -> None:
        """Write the row's elements: `body(indices)` for all indices of `shape`, in C order."""
        loop = self._open(shape)
        loop.value = body(loop.variables())
        self._close(loop)

    # ---- bookkeeping

    def _open(self, shape: Sequence[int]) -> Loop:
        self._num_loops += 1
        loop = Loop(self._num_loops, math.prod(shape), tuple(shape))
        self._loops.append(loop)
        return loop

    def _close(self, loop: Loop) -> None:
        closed = self._loops.pop()
        assert closed is loop, "loops close in the reverse of the order they open in"
        self.body.append(loop)

    def _let(self, template: str, names: tuple[str, ...], indices: tuple[Index, ...]) -> str:
        levels = [self._levels.get(name, ROW) for name in names]
        levels += [index.level for index in indices]
        level = at.join(levels)
        loop = self._loop(level)
        memo, body = (self._memo, self.body) if loop is None else (loop.memo, loop.body)
        key = (template, names, indices)
        if key not in memo:
            self._count += 1
            name = memo[key] = f"t{self._count}"
            self._levels[name] = level
            body.append(Statement(name, template, names, indices))
        return memo[key]

    def _loop(self, level: int) -> Loop | None:
        if level == ROW:
            return None
        assert self._loops, "a value of a loop is used outside of it"
        loop = self._loops[-1]
        assert loop.number == level, "a value of one loop is used in another"
        return loop


# Weights in device memory with fewer bits than a float32, and the WGSL that decodes them.
#
# `bf16` and `f16` have two numbers per u32, the first in the low half. `nf4` is as in
# `compute.nf4`: eight codes per u32, with tables for the scales of their blocks.

NF4 = "nf4"
BITS = {"bf16": 16, "f16": 16, NF4: 4}
LEVELS_BYTES = 64  # of the table of levels in workgroup memory


@dataclass(frozen=True, eq=False)
class Coding:
    """The format of a matrix: a key of BITS, and for NF4 its scales and their table, in C order."""

    kind: str
    tables: tuple[Buffer, ...] = ()


def coded_element(emitter: Emitter, codes: Buffer, coding: Coding, index: Index) -> str:
    """Return the name of the float32 that the code at `index` encodes."""
    if coding.kind != NF4:
        return emitter.load(codes, index)
    scales, second = coding.tables
    block = index.divide(BLOCK)
    byte = emitter.load(codes, index.divide(2))
    odd = emitter.number(index.modulo(2), "u32")
    level = emitter.position(emitter.load(scales, block), NUM_SECOND_LEVELS)
    factors = (
        emitter.load(second, level),
        emitter.load(second, block.divide(SECOND_BLOCK) + Index(MEAN + 1)),
        emitter.load(second, Index(MEAN)),
    )
    code = "(u32({0}) >> (4u - {1} * 4u)) & 15u"
    return emitter.op(f"nf4_level({code}) * ({{2}} * {{3}} + {{4}})", byte, odd, *factors)


def scale_function(name: str) -> str:
    """Return the WGSL of the function `<name>_scale`, which returns the scale of a block.

    It reads the tables `<name>_scales` and `<name>_second`.
    """
    return "\n".join(
        [
            f"fn {name}_scale(block: u32) -> f32 {{",
            f"    let code = ({name}_scales[block / 4u] >> (block % 4u * 8u)) & 255u;",
            f"    let second = {name}_second[{MEAN + 1}u + block / {SECOND_BLOCK}u];",
            f"    return {name}_second[code] * second + {name}_second[{MEAN}];",
            "}",
        ]
    )


def lane(kind: str, word: str, number: int) -> str:
    """Return the WGSL of the number with index `number` in a u32, without its scale."""
    if kind == NF4:
        return f"levels[({word} >> {(number ^ 1) * 4}u) & 15u]"
    if kind == "f16":
        return f"from_f16({word} >> 16u)" if number else f"from_f16({word} & 0xffffu)"
    return f"bitcast<f32>({word} & 0xffff0000u)" if number else f"bitcast<f32>({word} << 16u)"


def single(kind: str, array: str, at: str) -> str:
    """Return the WGSL of a u32 that has number `at` of `array` in lane 0 (NF4: lane 1)."""
    bits = BITS[kind]
    per_word = 32 // bits
    number = f"({at}) % {per_word}u" + (" ^ 1u" if kind == NF4 else "")
    return f"({array}[({at}) / {per_word}u] >> (({number}) * {bits}u)) & {2**bits - 1}u"
