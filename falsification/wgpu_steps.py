"""Bugs of the wgpu backend in a step's use of the device, and in refusals.

They are planted in the backend's own functions, and show on any adapter, also a software one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from torch import Tensor

from entrenar_py.compute import Array, DropFunction
from entrenar_py.compute.wgpu import lower, product, program, tiles
from entrenar_py.compute.wgpu.program import Dispatch, Program
from entrenar_py.compute.wgpu.resident import Resident, ResidentStep

from .wgpu_subjects import DECODER, LINEAR, MLP, PACKAGE, REFUSALS, SPLIT, TRAINING, mutant, steps

_encode, _read = Program.encode, Program._read
_call, _init = ResidentStep.__call__, Resident.__init__
_compile_graph, _lower = program.compile_graph, lower._Lowering._lower
_product_kernel = product.product_kernel


def never_known(*arguments: Any) -> object:
    """Returns a new cache key for each step, so that no program is found again."""
    return object()


def same_digest(tensors: Sequence[Tensor]) -> str:
    """Treats all frozen tensors as equal."""
    return ""


def all_moving(self: Resident, *arguments: Any, **keywords: Any) -> None:
    """Uploads frozen tensors with every step."""
    _init(self, *arguments, **keywords)
    self.moving, self.frozen = [*self.moving, *self.frozen], []


def zeros_on_failure(self: Program) -> memoryview:
    """Returns zeros without reading from the device."""
    return memoryview(bytes(self._result_bytes))


def submission_each(self: Program, encoder: Any, dispatches: Sequence[Dispatch]) -> None:
    """Makes a submission for each operation."""
    for one in dispatches:
        alone = self.device.handle.create_command_encoder()
        _encode(self, alone, [one])
        self.submit(alone)


def read_back_each(self: Program) -> memoryview:
    """Makes a read-back for each operation."""
    return [_read(self) for _ in self.dispatches][-1]


def scaled_twice(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """Scales gradients that are already scaled."""
    loss, gradients = _call(self, ids, drop)
    return loss, [self._scale * one for one in gradients]


def on_the_host(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """Computes the step on the CPU, without reporting it."""
    tensors = self._resident.tensors
    return self._workload.gradients(tensors, ids, drop=drop, scale=self._scale)


def first_weights(
    self: ResidentStep, ids: Sequence[int], drop: DropFunction
) -> tuple[float, list[Array]]:
    """Uploads the weights once, as if they were frozen."""
    resident = self._resident
    kept = self.__dict__.setdefault(
        "_first",
        {
            name: one.detach().clone().requires_grad_(one.requires_grad)
            for name, one in resident.tensors.items()
        },
    )
    moved = resident.tensors
    resident.tensors = {name: kept[name] for name in moved}
    try:
        return _call(self, ids, drop)
    finally:
        resident.tensors = moved


class InTurns:
    """Two programs of one step that add in different orders, and run alternately."""

    def __init__(self, *arguments: Any) -> None:
        self._programs = [_compile_graph(*arguments)]
        with patch(f"{PACKAGE}.values.product_kernel", _split):
            self._programs.append(_compile_graph(*arguments))

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run the program that did not run last."""
        self._programs.reverse()
        return self._programs[0].run(inputs)


def _split(given: tiles.Product, *arguments: Any, **keywords: Any) -> product.Kernel:
    return _product_kernel(given, *arguments, **keywords, tiling=SPLIT)


def passed_through(
    self: Any, name: str, node: Any, arguments: list[Any], keywords: dict[str, Any]
) -> Any:
    """Leaves out an operation without a kernel: its first operand becomes its result."""
    found = _lower(self, name, node, arguments, keywords)
    if found is not None:
        return found
    results = node.meta["val"]
    return (arguments[0],) * len(results) if isinstance(results, tuple) else arguments[0]


def without_place(node: Any) -> str:
    """Refuses without naming the operation or its line."""
    return "an operation is not supported"


VARIANTS = (
    mutant(
        "submits-each",
        "every operation is a separate submission",
        "classic (14,000 round trips a step)",
        {"program.Program.encode": submission_each},
        LINEAR,
        "F-WGPU-002",
        step=1,
        expected="1",
    ),
    mutant(
        "scaled-twice",
        "gradients are returned scaled and are scaled again",
        "classic (loss scaling)",
        {"resident.ResidentStep.__call__": scaled_twice},
        LINEAR,
        "F-WGPU-003",
        step=2,
        tensor="weight",
    ),
    mutant(
        "order-in-turns",
        "a step's products are added in a different order every second time",
        "classic (float atomics)",
        {"resident.compile_graph": InTurns},
        steps("linear", options={"samples": [37, 13]}, num_samples=80),
        "F-WGPU-005",
        step=1,
    ),
    mutant(
        "recompiles",
        "a step is captured and compiled again each time, since its key never matches",
        "classic (cache keyed by identity)",
        {"resident.Key": never_known},
        LINEAR,
        "F-WGPU-006",
        step=1,
        expected="0",
    ),
    mutant(
        "first-weights",
        "weights are uploaded for the first step only",
        "classic (stale copy on the device)",
        {"resident.ResidentStep.__call__": first_weights},
        TRAINING,
        "F-WGPU-008",
        step=1,
    ),
    mutant(
        "passes-through",
        "an operation without a kernel is left out",
        "classic (unknown operation is the identity)",
        {"lower._Lowering._lower": passed_through},
        REFUSALS,
        "F-WGPU-009",
        tensor="no kernel",
    ),
    mutant(
        "refuses-nameless",
        "a refusal names neither the operation nor its line",
        "classic",
        {"lower._refusal": without_place},
        REFUSALS,
        "F-WGPU-009",
        tensor="no kernel",
    ),
    mutant(
        "reads-each",
        "every operation is followed by a read-back",
        "classic (14,000 round trips a step)",
        {"program.Program._read": read_back_each},
        LINEAR,
        "F-WGPU-002",
        step=1,
        expected="1",
    ),
    mutant(
        "on-the-host",
        "the CPU silently computes the step instead of the device",
        "classic (silent fallback)",
        {"resident.ResidentStep.__call__": on_the_host},
        MLP,
        "F-WGPU-002",
        step=1,
        expected="1",
        got="0",
    ),
    mutant(
        "zeros",
        "results are zeros, since the device was not read",
        "classic (success of a stage that did nothing)",
        {"program.Program._read": zeros_on_failure},
        LINEAR,
        "F-WGPU-003",
        step=2,
        tensor="loss",
    ),
    mutant(
        "uploads-frozen",
        "frozen weights are uploaded again with every step",
        "classic",
        {"resident.Resident.__init__": all_moving},
        DECODER,
        "F-WGPU-002",
        step=1,
    ),
    mutant(
        "frozen-stale",
        "a replica computes with the frozen weights of the replica before it",
        "classic (cache key)",
        {"resident._digest": same_digest},
        DECODER,
        "F-WGPU-003",
        step=4,
    ),
)
