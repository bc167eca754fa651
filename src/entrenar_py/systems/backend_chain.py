"""The fallback chain on one real product, with backends made to fail as the faults say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from entrenar_py import backends, trace
from entrenar_py.backends import Backend, chain
from entrenar_py.errors import BackendUnavailable, UsageError
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.systems import products
from entrenar_py.systems.recorder import Recorder

OPENING_FAULTS = ("absent", "init_error")
COMPUTING_FAULTS = ("out_of_memory", "non_finite_output")
SHAPE = {"m": 33, "k": 65, "n": 17}  # ragged in every direction


def run(scenario: Scenario) -> trace.Trace:
    """Attempt events in order, then the Product of the backend that served, or a Halt.

    A fault strikes a backend that really works; where it is really absent, its own failure is
    what the trace shows, and no Injected event. Raises UsageError for faults this system can't
    inject and options no product can have.
    """
    for fault in scenario.faults:
        _check(fault)
    if "shapes" in scenario.options:
        raise UsageError(
            f"options shapes={scenario.options['shapes']!r} on system backend_chain: "
            "it computes one product; use m, k, n"
        )
    wanted = products.request({**SHAPE, **scenario.options})
    (pair,) = products.operands(scenario, wanted)
    recorder = Recorder(scenario)
    saboteur = Saboteur(scenario.faults, recorder)
    try:
        backend, result = chain.first_finite(
            lambda backend: saboteur.compute(backend, *pair),
            table={name: saboteur.opener(name) for name in backends.BACKENDS},
            on_attempt=lambda attempt: recorder.emit(trace.Attempt(**asdict(attempt))),
        )
    except (BackendUnavailable, MemoryError, RuntimeError) as error:
        # Also what the chain should have caught itself: the judge sees who was never tried.
        reason = f"{type(error).__name__}: {error}"
        recorder.emit(trace.Halt(step=0, reason=reason))
        return recorder.finish(status="halted", reason=reason)
    recorder.emit(products.measure(backend, pair, result, wanted))
    return recorder.finish(status="completed")


def _check(fault: Fault) -> None:
    kinds = (*OPENING_FAULTS, *COMPUTING_FAULTS)
    if fault.kind not in kinds:
        raise UsageError(
            f"fault kind={fault.kind!r} on system backend_chain: it can inject {', '.join(kinds)}"
        )
    if fault.backend not in backends.BACKENDS:
        raise UsageError(
            f"fault {fault.kind} backend={fault.backend!r}: "
            f"allowed are {', '.join(backends.BACKENDS)}"
        )


class Saboteur:
    """Makes backends fail where `faults` say, and records each fault that took effect."""

    def __init__(self, faults: tuple[Fault, ...], recorder: Recorder) -> None:
        self._faults = faults
        self._recorder = recorder

    def opener(self, name: str) -> Callable[[], Backend]:
        """Opens the real backend first, then fails if a fault says so."""

        def open_backend() -> Backend:
            backend = backends.open_backend(name)
            for fault in self._struck(name, OPENING_FAULTS):
                if fault.kind == "absent":
                    raise BackendUnavailable(f"backend {name}: no such device (injected)")
                raise RuntimeError(f"backend {name}: initialization failed (injected)")
            return backend

        return open_backend

    def compute(self, backend: Backend, a: Tensor, b: Tensor) -> Tensor:
        """The real product on `backend`, spoilt if a fault says so."""
        result = backend.matmul(a, b)
        for fault in self._struck(backend.name, COMPUTING_FAULTS):
            if fault.kind == "out_of_memory":
                raise torch.OutOfMemoryError(f"backend {backend.name}: out of memory (injected)")
            result.view(-1)[(fault.element or 0) % result.numel()] = float("nan")
        return result

    def _struck(self, name: str, kinds: tuple[str, ...]) -> Iterator[Fault]:
        """The faults of `kinds` planned for backend `name`, each recorded when its turn comes."""
        for fault in self._faults:
            if fault.backend == name and fault.kind in kinds:
                self._recorder.emit(trace.Injected(fault=fault.to_dict()))
                yield fault
