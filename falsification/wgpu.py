"""Bugs of the wgpu backend: in its kernels, its plan of memory, its cache, and what it asks for.

Planted where they would stand; what they do shows on a real adapter, be it software.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from entrenar_py.backends.steps import Array, DropFunction
from entrenar_py.backends.wgpu import (
    codegen,
    index,
    intrinsics,
    lower,
    product,
    product_text,
    program,
    values,
)
from entrenar_py.backends.wgpu.program import Dispatch, Program
from entrenar_py.backends.wgpu.resident import ResidentStep
from entrenar_py.mutants import Variant
from entrenar_py.scenario import Scenario

PACKAGE = "entrenar_py.backends.wgpu"
STEP = f"{PACKAGE}.resident.ResidentStep"

_product_kernel, _layout = product.product_kernel, values._layout
_load, _loop, _tree = product_text._load, codegen._loop, codegen._tree
_functions_of = intrinsics.functions_of
_encode, _read = Program.encode, Program._read
_call, _init = ResidentStep.__call__, ResidentStep.__init__
_compile_step, _lower, _pipeline = program.compile_step, lower._Lowering._lower, Program._pipeline


# --- kernels --------------------------------------------------------------------------------------


def swapped(given: product.Product, *arguments: Any, **keywords: Any) -> product.Kernel:
    """The second operand is read with n in the place of k."""
    return _product_kernel(replace(given, b=given.b.transposed()), *arguments, **keywords)


def without_barriers(*arguments: Any, **keywords: Any) -> list[str]:
    """Lanes go on before all have written."""
    return [line for line in _tree(*arguments, **keywords) if "workgroupBarrier" not in line]


def edge_unguarded(*arguments: Any, **keywords: Any) -> list[str]:
    """Past the end of k, the next row is read."""
    return [
        re.sub(r"if \(.* < .*u\) \{ (.*) \}", r"\1", line) for line in _load(*arguments, **keywords)
    ]


def strides_ignored(stored: values.Stored, shape: Sequence[int], batch: Any) -> product.Layout:
    """Operands are read as if they lay in C order."""
    return _layout(replace(stored, strides=index.strides_of(shape)), shape, batch)


def tail_dropped(loop: Any, indices: Any, rows: Any, lanes: int) -> list[str]:
    """A sum stops where not all lanes have an element."""
    full = loop.size - loop.size % lanes
    lines = _loop(loop, indices, rows, lanes)
    return [line.replace(f" < {loop.size};", f" < {full};") for line in lines]


def nan_dropped(text: str) -> list[str]:
    """The larger of a number and a NaN is what the device's `max` says."""
    plain = "fn larger(a: f32, b: f32) -> f32 { return max(a, b); }"
    return [plain if "fn larger(" in one else one for one in _functions_of(text)]


# --- memory and cache -----------------------------------------------------------------------------


def freed_early(
    steps: Sequence[values.Step], changing: Any, results: Any
) -> tuple[dict[Any, int], tuple[int, ...]]:
    """A buffer is free for another one after the last but one of the dispatches that read it."""
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
    """Pipelines are kept by their text without the strides that indices are multiplied by."""
    kept = self.__dict__.setdefault("_kept", {})
    key = re.sub(r"\* \d+u", "", source)
    if key not in kept:
        kept[key] = _pipeline(self, source)
    return kept[key]


def never_known(*arguments: Any) -> object:
    """A key that no step has again."""
    return object()


def same_digest(tensors: Sequence[Tensor]) -> str:
    """Whatever is frozen counts as the same."""
    return ""


def all_moving(self: ResidentStep, *arguments: Any, **keywords: Any) -> None:
    """Frozen tensors go up with every step."""
    _init(self, *arguments, **keywords)
    self._moving, self._frozen = [*self._moving, *self._frozen], []


# --- a step ---------------------------------------------------------------------------------------


def zeros_on_failure(self: Program) -> memoryview:
    """The device is never read, and what it would have said is zero."""
    return memoryview(bytes(self._result_bytes))


def submission_each(self: Program, encoder: Any, dispatches: Sequence[Dispatch]) -> None:
    """Each operation is submitted by itself."""
    for one in dispatches:
        alone = self.device.handle.create_command_encoder()
        _encode(self, alone, [one])
        self.submit(alone)


def read_back_each(self: Program) -> memoryview:
    """As many read-backs as operations."""
    return [_read(self) for _ in self.dispatches][-1]


def scaled_twice(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """Gradients that are scaled already are scaled."""
    loss, gradients = _call(self, ids, drop)
    return loss, [self._scale * one for one in gradients]


def on_the_host(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """The CPU computes the step, and nobody is told."""
    return self._workload.gradients(self._tensors, ids, drop=drop, scale=self._scale)


def first_weights(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """Weights go up once, as if they were frozen."""
    kept = self.__dict__.setdefault(
        "_first",
        {
            name: one.detach().clone().requires_grad_(one.requires_grad)
            for name, one in self._tensors.items()
        },
    )
    moved = self._tensors
    self._tensors = {name: kept[name] for name in moved}
    try:
        return _call(self, ids, drop)
    finally:
        self._tensors = moved


class InTurns:
    """Two programs of one step that add in different orders, and run in turns."""

    def __init__(self, *arguments: Any) -> None:
        self._programs = [_compile_step(*arguments)]
        with patch(f"{PACKAGE}.values.product_kernel", _split):
            self._programs.append(_compile_step(*arguments))

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """The one that did not run last."""
        self._programs.reverse()
        return self._programs[0].run(inputs)


def _split(given: product.Product, *arguments: Any, **keywords: Any) -> product.Kernel:
    return _product_kernel(given, *arguments, **keywords, tiling=product.SMALL_SPLIT)


def passed_through(
    self: Any, name: str, node: Any, arguments: list[Any], keywords: dict[str, Any]
) -> Any:
    """What has no kernel is left out."""
    found = _lower(self, name, node, arguments, keywords)
    if found is not None:
        return found
    results = node.meta["val"]
    return (arguments[0],) * len(results) if isinstance(results, tuple) else arguments[0]


def without_place(node: Any) -> str:
    """Nothing is said of what is not supported."""
    return "an operation is not supported"


# --- where they show ------------------------------------------------------------------------------


def _operations(*names: str) -> Scenario:
    return Scenario(
        system="wgpu_operations",
        workload="linear",
        world_size=1,
        seed=0,
        backends=("wgpu",),
        options={"operations": list(names)},
    )


def _steps(workload: str, **changes: Any) -> Scenario:
    return Scenario(
        system="wgpu_steps", workload=workload, world_size=1, seed=0, backends=("wgpu",), **changes
    )


LINEAR = _steps("linear")
MLP = _steps("mlp", dropout=0.3)
DECODER = _steps("decoder", options={"samples": [1, 3]})
REFUSALS = LINEAR.with_(system="wgpu_refusals")
TRAINING = Scenario(
    system="reference",
    workload="mlp",
    world_size=1,
    seed=0,
    num_shards=1,
    num_samples=21,
    batch_size=7,
    num_steps=20,
    learning_rate=0.1,
    backends=("wgpu",),
)


def _mutant(
    name: str,
    summary: str,
    source: str,
    plants: dict[str, Callable[..., Any]],
    scenario: Scenario,
    *invariants: str,
    **place: Any,
) -> Variant:
    return Variant(
        name=f"wgpu-{name}",
        summary=summary,
        source=source,
        plants={f"{PACKAGE}.{path}": new for path, new in plants.items()},
        scenario=scenario,
        invariants=invariants,
        place=place,
    )


VARIANTS = (
    _mutant(
        "submits-each",
        "every operation is a submission of its own",
        "classic (14,000 round trips a step)",
        {"program.Program.encode": submission_each},
        LINEAR,
        "F-WGPU-002",
        step=1,
        expected="1",
    ),
    _mutant(
        "scaled-twice",
        "gradients come back scaled and are scaled again",
        "classic (loss scaling, pytorch #37751)",
        {"resident.ResidentStep.__call__": scaled_twice},
        LINEAR,
        "F-WGPU-003",
        step=2,
        tensor="weight",
    ),
    _mutant(
        "swapped",
        "the second operand of a product is read with n in the place of k",
        "classic",
        {"values.product_kernel": swapped},
        _operations("mm_tall"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    _mutant(
        "order-in-turns",
        "a step's products add in another order every second time",
        "classic (float atomics; pytorch #15359)",
        {"resident.compile_step": InTurns},
        _steps("linear", options={"samples": [37, 13]}, num_samples=80),
        "F-WGPU-005",
        step=1,
    ),
    _mutant(
        "recompiles",
        "a step is captured and compiled again each time, since its key never matches",
        "classic (cache keyed by identity)",
        {"resident.Key": never_known},
        LINEAR,
        "F-WGPU-006",
        step=1,
        expected="0",
    ),
    _mutant(
        "nan-dropped",
        "the largest element is taken with a `max` that prefers numbers to NaNs",
        "WGSL allows it (max of NaN and a number)",
        {"codegen.functions_of": nan_dropped},
        _operations("amax"),
        "F-WGPU-007",
        tensor="result 0",
    ),
    _mutant(
        "first-weights",
        "weights are uploaded for the first step and stay as they were",
        "classic (stale copy on the device)",
        {"resident.ResidentStep.__call__": first_weights},
        TRAINING,
        "F-WGPU-008",
        step=1,
    ),
    _mutant(
        "passes-through",
        "an operation without a kernel is left out",
        "classic (unknown operation is the identity)",
        {"lower._Lowering._lower": passed_through},
        REFUSALS,
        "F-WGPU-009",
        tensor="no kernel",
    ),
    _mutant(
        "refuses-nameless",
        "a refusal names neither the operation nor its line",
        "classic",
        {"lower._refusal": without_place},
        REFUSALS,
        "F-WGPU-009",
        tensor="no kernel",
    ),
    _mutant(
        "reads-each",
        "every operation is followed by a read-back",
        "classic (14,000 round trips a step)",
        {"program.Program._read": read_back_each},
        LINEAR,
        "F-WGPU-002",
        step=1,
        expected="1",
    ),
    _mutant(
        "on-the-host",
        "the CPU computes the step in the device's place, and nobody is told",
        "pytorch #77764 (silent fallback)",
        {"resident.ResidentStep.__call__": on_the_host},
        MLP,
        "F-WGPU-002",
        step=1,
        expected="1",
        got="0",
    ),
    _mutant(
        "zeros",
        "results are zeros where the device was not read",
        "classic (success of a stage that did nothing)",
        {"program.Program._read": zeros_on_failure},
        LINEAR,
        *("F-WGPU-003", "F-WGPU-002"),
    ),
    _mutant(
        "no-barrier",
        "lanes that fold a row do not wait for each other",
        "classic",
        {"codegen._tree": without_barriers},
        _operations("sum"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    _mutant(
        "edge-unguarded",
        "past the end of k a product reads what comes next in memory",
        "classic (edge of a tile)",
        {"product_text._load": edge_unguarded},
        _operations("mm"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    _mutant(
        "strides-ignored",
        "operands of a product are read as if they lay in C order",
        "pytorch #118117, #162779",
        {"values._layout": strides_ignored},
        _operations("mm_tall"),
        "F-WGPU-004",
        tensor="result 0",
    ),
    _mutant(
        "tail-dropped",
        "a reduction stops at the last full round of its lanes",
        "classic (edge of a workgroup)",
        {"codegen._loop": tail_dropped},
        _operations("sum"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    _mutant(
        "pipelines-by-shape",
        "compiled kernels are kept by a key that leaves the strides out",
        "classic (cache key)",
        {"program.Program._pipeline": pipelines_without_strides},
        _operations("mm_square"),
        "F-WGPU-004",
        tensor="result 1",
    ),
    _mutant(
        "freed-early",
        "a buffer is given to another tensor before its last reader has run",
        "classic (lifetime one too short)",
        {"plan._assign": freed_early},
        MLP,
        "F-WGPU-003",
        step=2,
    ),
    _mutant(
        "uploads-frozen",
        "frozen weights are uploaded again with every step",
        "classic",
        {"resident.ResidentStep.__init__": all_moving},
        DECODER,
        "F-WGPU-002",
        step=1,
    ),
    _mutant(
        "frozen-stale",
        "a replica computes with the frozen weights of the one before it",
        "classic (cache key)",
        {"resident._digest": same_digest},
        DECODER,
        "F-WGPU-003",
        step=6,
    ),
)
