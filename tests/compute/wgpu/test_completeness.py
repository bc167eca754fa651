"""A clause tries every operation that the wgpu backend has a kernel for."""

from __future__ import annotations

import torch
from torch import Tensor

from entrenar_py.compute.wgpu.capture import capture, name_of
from entrenar_py.compute.wgpu.lower import OPERATIONS
from entrenar_py.compute.wgpu.pointwise import SCALARS
from entrenar_py.systems.probes import wgpu_operations
from entrenar_py.systems.probes.wgpu_operations import CASES, Case

# Only tried in test_operations, which compares with torch and needs no bound.
WITHOUT_BOUND = {
    "max": "two results, and a bound is known for an operation of one",
    "min": "as max",
    "prod": "no bound on its error is known",
}
# These are `div` with a rounding mode. Each mode is a case.
MODES = {"div_floor", "div_trunc"}


def operations_of(case: Case) -> set[str]:
    """Return the names of the operations in the captured graph of `case`."""
    groups = wgpu_operations.operands(case, torch.Generator().manual_seed(0))
    flat = [one for group in groups for one in group]

    def compute(*given: Tensor) -> tuple[Tensor, ...]:
        usual, large = given[: case.num_operands], given[case.num_operands :]
        return tuple(wgpu_operations.results(case, usual, large))

    nodes = capture(compute, flat).graph.nodes
    return {name_of(node) for node in nodes if node.op == "call_function"}


def test_every_operation_has_a_case_and_every_case_an_operation() -> None:
    """The operations with a kernel are exactly those that the cases use."""
    claimed = set(OPERATIONS) | set(SCALARS)
    tried = {name: operations_of(case) for name, case in CASES.items()}
    assert set().union(*tried.values()) | set(WITHOUT_BOUND) | MODES == claimed
    assert set(CASES) >= MODES
    assert [name for name, found in tried.items() if not found] == []
