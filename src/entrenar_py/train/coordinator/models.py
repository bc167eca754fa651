"""The workload and the backends that a plan names, and the element that a fault changes."""

from __future__ import annotations

from dataclasses import asdict
from math import prod

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.systems import AUTO
from entrenar_py.train.arithmetic import workload
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator.recorder import Recorder


def model_of(plan: TrainingPlan) -> Workload:
    """Return the plan's workload with data; raise UsageError for an unknown name or size."""
    return workload.build(
        plan.workload,
        num_samples=plan.num_samples,
        width=plan.width,
        data=plan.rng("data"),
        terms=plan.options.get("terms"),
    )


def place_of(fault: Fault, model: Workload) -> tuple[str, int]:
    """Return the trainable tensor and the flat index of the element that `fault` changes.

    The defaults are the first tensor and the first element. Raises UsageError for a tensor that is
    not trained, and for an element past the end of the tensor.
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


class Devices:
    """The backends of the workers in this process, each opened at its first use.

    `auto` tries the fallback chain once and records each attempt as an Attempt event. The first
    backend that works serves all `auto` workers until the end of the run. Other names have no
    fallback.
    """

    def __init__(self, plan: TrainingPlan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder
        self._opened: dict[str, Backend] = {}

    def of(self, rank: int) -> Backend:
        """Return the backend of worker `rank`; raise BackendUnavailable if it can't be opened."""
        name = self._plan.backend_of(rank)
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    @property
    def alike(self) -> bool:
        """True if all workers compute on the same backend.

        Different backends may round differently.
        """
        return len({backend.name for backend in self._opened.values()}) == 1

    def _open(self, name: str) -> Backend:
        if name == AUTO:
            return chain.auto(on_attempt=self._record)
        return backends.open_backend(name)

    def _record(self, attempt: chain.Attempt) -> None:
        self._recorder.emit(trace.Attempt(**asdict(attempt)))
