"""The names, shapes and dtypes of the gradients that a worker would send, on each backend."""

from __future__ import annotations

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.recorder import Recorder

DECLARED = "model"  # the `backend` of the Manifest that the workload declares

Entries = tuple[tuple[str, tuple[int, ...], str], ...]


def run(scenario: Scenario) -> trace.Trace:
    """Record the Manifest that the workload declares, then one per backend of the scenario.

    A backend that can't be used gets a failed Attempt with the reason instead. All backends start
    from the same weights and compute the same batch.
    """
    model = models.model_of(scenario)
    recorder = Recorder(scenario)
    recorder.emit(trace.Manifest(backend=DECLARED, entries=declared(model)))
    for name in scenario.backends:
        try:
            backend = backends.open_backend(name)
            entries = sent(scenario, model, backend)
        except BackendUnavailable as error:
            recorder.emit(trace.Attempt(backend=name, served=False, reason=str(error)))
            continue
        recorder.emit(
            trace.Manifest(
                backend=name, entries=entries, device=backend.device, software=backend.software
            )
        )
    return recorder.finish(status="completed")


def declared(model: Workload) -> Entries:
    """Return (name, shape, dtype) of each gradient that a receiver expects."""
    return tuple((s.name, s.shape, "float32") for s in model.specs if s.role == "trainable")


def sent(scenario: Scenario, model: Workload, backend: Backend) -> Entries:
    """Return (name, shape, dtype) of each array that a worker on `backend` would send.

    Arrays are sent without names. They get the model's names, in order; arrays beyond the last name
    are "without a name".
    """
    replica = engine.Engine(model, backend, model.initial(scenario.rng("initial")), scale=1.0)
    step = backend.stepper(model, replica.tensors, scale=1.0)
    _, arrays = step(range(scenario.batch_size), engine.no_dropout)
    names = [name for name, _, _ in declared(model)]
    names += ["without a name"] * (len(arrays) - len(names))
    return tuple(
        (name, array.shape, array.dtype.name) for name, array in zip(names, arrays, strict=False)
    )
