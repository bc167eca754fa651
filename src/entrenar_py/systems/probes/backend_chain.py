"""The fallback chain on one real matrix product, with backends that fail as planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from entrenar_py import compute as backends
from entrenar_py.compute import Backend, chain, on_torch
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.faults import OF_ADAPTERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import products
from entrenar_py.train.coordinator.recorder import Recorder

Struck = Callable[[], None]


def has_adapter(backend: Backend) -> bool:
    """Return whether `backend` computes on a WebGPU adapter, whatever its name."""
    from entrenar_py.compute.wgpu import WgpuBackend

    return isinstance(backend, WgpuBackend)


def open_doomed(kind: str, on_strike: Struck) -> Backend:
    """Return the best adapter, opened again with the fault `kind` of `faults.OF_ADAPTERS`.

    `on_strike` is called when the fault occurs. Raises BackendUnavailable if there is no adapter.
    """
    from entrenar_py.compute import wgpu
    from entrenar_py.compute.wgpu.device import open_device

    logging.getLogger("wgpu").addFilter(_is_news)
    device = open_device(0)
    doomed = DOOMS[kind](device.handle, on_strike)
    return wgpu.WgpuBackend(replace(device, handle=doomed), name="wgpu")


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for wgpu-py's messages about a lost device, which is lost on purpose here."""
    said = record.getMessage()
    return not ("DEVICE LOST" in said or "was lost (destroyed)" in said)


class Doomed:
    """A wrapper of a wgpu.GPUDevice, `handle`; each subclass makes one type of request fail."""

    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Lost(Doomed):
    """A device that is lost after the first submission, before its result is read."""

    @property
    def queue(self) -> Any:
        """The device's queue, which destroys the device after one submission."""
        return _LastQueue(self._handle, self._on_strike)


class _LastQueue:
    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle.queue, name)

    def submit(self, commands: Sequence[Any]) -> None:
        """Submit `commands`, and destroy the device."""
        self._handle.queue.submit(commands)
        self._on_strike()
        self._handle.destroy()


class TooLarge(Doomed):
    """A device that requests each new buffer larger than the adapter allows."""

    def create_buffer(self, *, size: int, **given: Any) -> Any:
        """Request a buffer at least four bytes larger than the device's limit."""
        self._on_strike()
        return self._handle.create_buffer(
            size=max(size, self._handle.limits["max-buffer-size"] + 4), **given
        )


class Rejecting(Doomed):
    """A device that truncates each shader in the middle."""

    def create_shader_module(self, *, code: str, **given: Any) -> Any:
        """Compile the first half of `code`."""
        self._on_strike()
        return self._handle.create_shader_module(code=code[: len(code) // 2], **given)


DOOMS: dict[str, type[Doomed]] = {
    "device_lost": Lost,
    "too_large": TooLarge,
    "shader_rejected": Rejecting,
}


SHAPE = {"m": 33, "k": 65, "n": 17}  # not a multiple of the tile size in any direction


def run(scenario: Scenario) -> trace.Trace:
    """Record an Attempt for each backend tried, then the Product of the one that worked, or a Halt.

    The scenario's `backends` are the chain. A fault occurs when its backend is tried, even if this
    machine lacks the backend (see `Saboteur`). Raises UsageError for a chain in an unusual order,
    two faults on one backend, a fault on a backend outside the chain, a fault of adapters on a
    backend other than wgpu, and impossible options of a product.
    """
    order = _order(scenario)
    _check_faults(scenario.faults, order)
    wanted = products.request({**SHAPE, **scenario.options})
    (pair,) = products.operands(scenario, wanted)
    recorder = Recorder(scenario)
    saboteur = Saboteur(scenario.faults, recorder)
    try:
        backend, result = chain.first_finite(
            lambda backend: saboteur.compute(backend, *pair),
            order=order,
            table={name: saboteur.opener(name) for name in order},
            on_attempt=lambda attempt: recorder.emit(trace.Attempt(**asdict(attempt))),
        )
    except (BackendUnavailable, MemoryError, RuntimeError) as error:
        # The chain should have caught the last two itself; the judge sees which backend it skipped.
        reason = f"{type(error).__name__}: {error}"
        recorder.emit(trace.Halt(step=0, reason=reason))
        return recorder.finish(status="halted", reason=reason)
    recorder.emit(products.measure(backend, pair, result, wanted))
    return recorder.finish(status="completed")


def _order(scenario: Scenario) -> tuple[str, ...]:
    """Return the chain that `scenario` names; raise UsageError if it is not in the usual order."""
    order = tuple(name for name in chain.ORDER if name in scenario.backends)
    if order != scenario.backends:
        raise UsageError(
            f"backends={list(scenario.backends)} on system backend_chain: "
            f"use {', '.join(chain.ORDER)} in this order, each once, or leave some out"
        )
    return order


def _check_faults(faults: tuple[Fault, ...], order: tuple[str, ...]) -> None:
    for position, fault in enumerate(faults):
        if fault.backend not in order:
            raise UsageError(
                f"fault {fault.kind} backend={fault.backend!r}: the chain has {', '.join(order)}"
            )
        if fault.kind in OF_ADAPTERS and fault.backend != "wgpu":
            raise UsageError(f"fault {fault.kind} backend={fault.backend!r}: use wgpu")
        if fault.backend in {earlier.backend for earlier in faults[:position]}:
            raise UsageError(
                f"fault {fault.kind} backend={fault.backend!r}: a backend fails once in a run; "
                "use one fault for each"
            )


class Saboteur:
    """Makes backends fail as `faults` say, one fault per backend, and records each fault.

    Faults of an adapter happen on the real adapter if there is one (`open_doomed`). If this machine
    lacks a device, the CPU is used under its name. Such a substitute is opened only for a backend
    with a fault.
    """

    def __init__(self, faults: tuple[Fault, ...], recorder: Recorder) -> None:
        self._faults = {fault.backend: fault for fault in faults}
        self._recorder = recorder

    def opener(self, name: str) -> Callable[[], Backend]:
        """Return a function that opens backend `name`, or fails if a fault requires that."""

        def open_backend() -> Backend:
            if self._strikes(name, "absent"):
                raise BackendUnavailable(f"backend {name}: no such device (injected)")
            try:
                backend = backends.open_backend(name)
            except BackendUnavailable as error:
                if name not in self._faults:
                    raise
                backend = replace(on_torch.open_cpu(), name=name, device=f"stand-in, for {error}")
            if self._strikes(name, "init_error"):
                raise RuntimeError(f"backend {name}: initialization failed (injected)")
            kind = self._faults[name].kind if name in self._faults else None
            if kind in OF_ADAPTERS and has_adapter(backend):
                return open_doomed(kind, lambda: self._record(name))
            return backend

        return open_backend

    def compute(self, backend: Backend, a: Tensor, b: Tensor) -> Tensor:
        """Return the real product on `backend`; fail or corrupt it if a fault requires that."""
        if self._strikes(backend.name, "out_of_memory"):
            raise torch.OutOfMemoryError(f"backend {backend.name}: out of memory (injected)")
        for kind in OF_ADAPTERS:
            if not has_adapter(backend) and self._strikes(backend.name, kind):
                raise BackendUnavailable(f"backend {backend.name}: {kind} (injected)")
        result = backend.matmul(a, b)
        if self._strikes(backend.name, "non_finite_output"):
            element = self._faults[backend.name].element or 0
            result.view(-1)[element % result.numel()] = float("nan")
        return result

    def _strikes(self, name: str, kind: str) -> bool:
        """Return whether the fault of backend `name` is of `kind`; if so, record it."""
        fault = self._faults.get(name)
        if fault is None or fault.kind != kind:
            return False
        self._record(name)
        return True

    def _record(self, name: str) -> None:
        event = trace.Injected(fault=self._faults[name].to_dict())
        if event not in self._recorder.of(trace.Injected):
            self._recorder.emit(event)
