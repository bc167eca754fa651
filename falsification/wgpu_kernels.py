"""Bugs of the wgpu backend in its kernels, its plan of memory, and its cache of pipelines.

They are planted in the backend's own functions, and show on any adapter, also a software one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.compute.wgpu import codegen, emitter, index, product, tiles, values
from entrenar_py.compute.wgpu.program import Program

from .wgpu_subjects import MLP, mutant, operations

_product_kernel, _layout = product.product_kernel, values._layout
_load, _loop, _tree = product.load, codegen._loop, codegen._tree
_lane = emitter.lane
_functions_of, _pipeline = codegen.functions_of, Program._pipeline


def swapped(given: tiles.Product, *arguments: Any, **keywords: Any) -> product.Kernel:
    """Reads the second operand with n and k swapped."""
    return _product_kernel(replace(given, b=given.b.transposed()), *arguments, **keywords)


def without_barriers(*arguments: Any, **keywords: Any) -> list[str]:
    """Removes the barriers, so that lanes go on before all lanes have written."""
    return [line for line in _tree(*arguments, **keywords) if "workgroupBarrier" not in line]


def edge_unguarded(*arguments: Any, **keywords: Any) -> list[str]:
    """Reads into the next row past the end of k."""
    return [
        re.sub(r"if \(.* < .*u\) \{ (.*) \}", r"\1", line) for line in _load(*arguments, **keywords)
    ]


def strides_ignored(stored: values.Stored, shape: Sequence[int], batch: Any) -> tiles.Layout:
    """Reads operands as if they were in C order."""
    return _layout(replace(stored, strides=index.strides_of(shape)), shape, batch)


def halves_swapped(kind: str, word: str, number: int) -> str:
    """Reads the two codes of a byte in the wrong order."""
    return _lane(kind, word, number ^ 1)


def tail_dropped(loop: Any, indices: Any, rows: Any, out: Any, lanes: int) -> list[str]:
    """Stops a sum where not all lanes have an element."""
    full = loop.size - loop.size % lanes
    lines = _loop(loop, indices, rows, out, lanes)
    return [line.replace(f" < {loop.size};", f" < {full};") for line in lines]


def nan_dropped(text: str) -> list[str]:
    """Uses the device's `max`, which may drop a NaN."""
    plain = "fn larger(a: f32, b: f32) -> f32 { return max(a, b); }"
    return [plain if "fn larger(" in one else one for one in _functions_of(text)]


def freed_early(
    steps: Sequence[values.Step], changing: Any, results: Any
) -> tuple[dict[Any, int], tuple[int, ...]]:
    """Frees a buffer after the second-last dispatch that reads it."""
    slots: dict[Any, int] = {}
    sizes: list[int] = []
    free: list[int] = []
    uses: dict[Any, list[int]] = {}
    for number, step in enumerate(steps):
        for one in step.bindings:
            if one is not step.writes:
                uses.setdefault(one, []).append(number)
    last = {one: found[-2] if len(found) > 1 else found[-1] for one, found in uses.items()}
    for number, step in enumerate(steps):
        taken = {slots[one] for one in step.bindings if one in slots}
        out = step.writes
        if out not in slots:
            fitting = [i for i in free if sizes[i] >= out.num_bytes and i not in taken]
            if fitting:
                slots[out] = fitting[0]
                free.remove(fitting[0])
            else:
                slots[out] = len(sizes)
                sizes.append(out.num_bytes)
        for one in dict.fromkeys(step.bindings):
            ended = one in slots and last.get(one) == number and one not in results
            if ended and slots[one] not in free:
                free.append(slots[one])
    return slots, tuple(sizes)


def pipelines_without_strides(self: Program, source: str) -> Any:
    """Caches pipelines by their text without the strides, so that strides may be wrong."""
    kept = self.__dict__.setdefault("_kept", {})
    key = re.sub(r"\* \d+u", "", source)
    if key not in kept:
        kept[key] = _pipeline(self, source)
    return kept[key]


VARIANTS = (
    mutant(
        "swapped",
        "the second operand of a product is read with n instead of k",
        "classic",
        {"values.product_kernel": swapped},
        operations("mm_tall"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    mutant(
        "nan-dropped",
        "the largest element is taken with a `max` that prefers numbers to NaNs",
        "WGSL allows it (max of NaN and a number)",
        {"codegen.functions_of": nan_dropped},
        operations("amax"),
        "F-WGPU-007",
        tensor="result 0",
    ),
    mutant(
        "no-barrier",
        "lanes that fold a row do not wait for each other",
        "classic",
        {"codegen._tree": without_barriers},
        operations("sum"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    mutant(
        "edge-unguarded",
        "past the end of k a product reads the memory behind it",
        "classic (edge of a tile)",
        {"product.load": edge_unguarded},
        operations("mm"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    mutant(
        "halves-swapped",
        "a product reads the two codes of a byte in the wrong order",
        "bitsandbytes packs the first code into the high half, GGUF into the low one",
        {"emitter.lane": halves_swapped},
        operations("nf4"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    mutant(
        "strides-ignored",
        "operands of a product are read as if they were in C order",
        "pytorch #118117, #162779",
        {"values._layout": strides_ignored},
        operations("mm_tall"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    mutant(
        "tail-dropped",
        "a reduction stops at the last full round of its lanes",
        "classic (edge of a workgroup)",
        {"codegen._loop": tail_dropped},
        operations("sum"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    mutant(
        "pipelines-by-shape",
        "compiled kernels are kept by a key that leaves the strides out",
        "classic (cache key)",
        {"program.Program._pipeline": pipelines_without_strides},
        operations("mm_square"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    mutant(
        "freed-early",
        "a buffer is given to another tensor before its last reader has run",
        "classic (lifetime one too short)",
        {"program._assign": freed_early},
        MLP,
        "F-WGPU-003",
        step=2,
    ),
)
