"""The workload that a scenario names, and the tensor elements that its faults change."""

from __future__ import annotations

from math import prod

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import workload
from entrenar_py.train.arithmetic.tensors import Workload


def model_of(scenario: Scenario) -> Workload:
    """Return the scenario's workload with data; raise UsageError for an unknown name or size."""
    return workload.build(
        scenario.workload,
        num_samples=scenario.num_samples,
        width=scenario.width,
        data=scenario.rng("data"),
        terms=scenario.options.get("terms"),
    )


def place_of(fault: Fault, model: Workload) -> tuple[str, int]:
    """Return the trainable tensor whose gradient `fault` changes, and the element's flat index.

    By default each is the first one. Raises UsageError for a tensor that is not trained, and for
    an element past the end of the tensor.
    """
    sizes = {spec.name: prod(spec.shape) for spec in model.specs if spec.role == "trainable"}
    tensor, element = fault.tensor or next(iter(sizes)), fault.element or 0
    if tensor not in sizes:
        raise UsageError(f"fault {fault.kind} tensor={tensor!r}: allowed are {', '.join(sizes)}")
    if element >= sizes[tensor]:
        raise UsageError(
            f"fault {fault.kind} element={element}: {tensor} of {model.name} has {sizes[tensor]} "
            f"elements; use 0 to {sizes[tensor] - 1}"
        )
    return tensor, element
