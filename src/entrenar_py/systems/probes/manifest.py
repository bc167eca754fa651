"""The gradients that a worker would send, on every backend that opens: what they consist of."""

from __future__ import annotations

from entrenar_py import backends, trace
from entrenar_py.backends import Backend
from entrenar_py.errors import BackendUnavailable
from entrenar_py.scenario import Scenario
from entrenar_py.systems import models
from entrenar_py.systems.recorder import Recorder
from entrenar_py.training import dropout, engine
from entrenar_py.training.tensors import Workload

DECLARED = "model"  # stands in a Manifest's `backend` for the workload's own word

Entries = tuple[tuple[str, tuple[int, ...], str], ...]


def run(scenario: Scenario) -> trace.Trace:
    """The Manifest that the model declares, then one per backend, or a failed Attempt that says why
    a backend was skipped.

    Each of the scenario's `backends` starts from the same weights and sees the same batch.
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
    """(name, shape, dtype) of the gradients as whoever receives them expects them."""
    return tuple((s.name, s.shape, "float32") for s in model.specs if s.role == "trainable")


def sent(scenario: Scenario, model: Workload, backend: Backend) -> Entries:
    """(name, shape, dtype) of each array that `model` gives a worker on `backend` to send.

    Arrays travel without names: the receiver gives them those of the model, in order, and has none
    for arrays beyond the last.
    """
    replica = engine.Engine(model, backend, model.initial(scenario.rng("initial")), scale=1.0)
    step = backend.stepper(model, replica.tensors, scale=1.0)
    _, arrays = step(range(scenario.batch_size), dropout.none)
    names = [name for name, _, _ in declared(model)]
    names += ["without a name"] * (len(arrays) - len(names))
    return tuple(
        (name, array.shape, array.dtype.name) for name, array in zip(names, arrays, strict=False)
    )
