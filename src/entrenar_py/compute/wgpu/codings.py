"""Weights in device memory that take fewer bits than a float32, and the WGSL that decodes them.

`bf16` and `f16` are two numbers a u32, the first in the low half. `nf4` is as in `backends.nf4`:
eight codes a u32, with tables for the scales of their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrenar_py.compute.nf4 import BLOCK, MEAN, NUM_SECOND_LEVELS, SECOND_BLOCK
from entrenar_py.compute.wgpu.emitter import Buffer, Emitter
from entrenar_py.compute.wgpu.index import Index

NF4 = "nf4"
BITS = {"bf16": 16, "f16": 16, NF4: 4}
LEVELS_BYTES = 64  # of the levels in workgroup memory


@dataclass(frozen=True, eq=False)
class Coding:
    """How a matrix is stored: a key of BITS, and for NF4 its scales and their table, in C order."""

    kind: str
    tables: tuple[Buffer, ...] = ()


def element(emitter: Emitter, codes: Buffer, coding: Coding, index: Index) -> str:
    """Return the name of the float32 that the code at `index` stands for."""
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
    """Return the WGSL of `<name>_scale`: the scale of a block, by the tables `<name>_scales` and
    `<name>_second`."""
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
    """Return the WGSL of number `number` of a u32, without its scale."""
    if kind == NF4:
        return f"levels[({word} >> {(number ^ 1) * 4}u) & 15u]"
    if kind == "f16":
        return f"from_f16({word} >> 16u)" if number else f"from_f16({word} & 0xffffu)"
    return f"bitcast<f32>({word} & 0xffff0000u)" if number else f"bitcast<f32>({word} << 16u)"


def single(kind: str, array: str, at: str) -> str:
    """Return the WGSL of the u32 whose lane 0 (NF4: lane 1) is number `at` of `array`."""
    bits = BITS[kind]
    per_word = 32 // bits
    number = f"({at}) % {per_word}u" + (" ^ 1u" if kind == NF4 else "")
    return f"({array}[({at}) / {per_word}u] >> (({number}) * {bits}u)) & {2**bits - 1}u"
