"""Refuses a run of this machine's processes that its memory can't hold, before it begins.

Source: distributed-training-v1, F-HET-002: each worker fits the device that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from entrenar_py.shared import scenario
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.plan import advice, devices, memory, plan
from entrenar_py.train.plan.devices import Device
from entrenar_py.train.plan.plan import Run
from entrenar_py.train.plan.shape import Shape
from entrenar_py.train.plan.units import size

RULE = "F-HET-002"


def require(run: Run, strategy: str = "star") -> None:
    """Raise UsageError if a device has too little memory for the workers that it is given.

    A star's coordinator, which holds the model as well, shares the CPU's memory.
    """
    if not any(one.memory is not None for one in run.devices):
        return
    option, has_coordinator = plan.option(run, strategy), strategy == "star"
    for worker in () if option.problem else option.workers:
        extra = _coordinator(run.shape) if has_coordinator and worker.device.kind == "cpu" else 0
        limit, parts = worker.device.memory, (worker.memory, worker.recomputed)
        needed = worker.sharing * parts[run.recompute].needed + extra
        if limit is None or needed <= limit:
            continue
        whom = "a worker needs" if worker.sharing == 1 else f"{worker.sharing} workers need"
        beside = f", and the coordinator {size(extra)}" if extra else ""
        raise UsageError(
            f"{RULE}: {whom} {size(needed - extra)} of {worker.device.name}{beside}, which has "
            f"{size(limit)}; {_advice(run, strategy, has_coordinator=has_coordinator)}; "
            "`entrenar plan` shows all of it"
        )


def _advice(run: Run, strategy: str, *, has_coordinator: bool) -> str:
    """Return what would fit, with a worker's peak."""
    room = [_less(one, run.shape) if has_coordinator else one for one in run.devices]
    fitting = advice.remedies(replace(run, devices=tuple(room)), strategy)
    if not fitting:
        return "nothing that the configuration can change would fit"
    return f"what would fit, with a worker's peak: {', or '.join(fitting)}"


def of_backends(names: Sequence[str], described: Sequence[str]) -> list[Device]:
    """Return the devices that backends of these names open, each once.

    If the configuration describes devices, the next one of a backend's kind is taken. Raises
    UsageError if there is none.
    """
    if not described:
        return [devices.of_backend(name) for name in dict.fromkeys(names)]
    left, taken = devices.described(described), list[Device]()
    for name in dict.fromkeys(names):
        kind = scenario.backend_kind(name)
        alike = [one for one in left if one.kind == kind]
        if not alike:
            raise UsageError(
                f"devices: none is described for backend {name}; describe one of kind {kind}, or "
                "leave devices out"
            )
        taken.append(alike[0])
        left.remove(alike[0])
    return taken


def _less(device: Device, shape: Shape) -> Device:
    """Return a device with what it has left for workers."""
    if device.memory is None or device.kind != "cpu":
        return device
    return replace(device, memory=max(device.memory - _coordinator(shape), 0))


def _coordinator(shape: Shape) -> int:
    """Return the bytes of a coordinator: the model, and the state of the run."""
    return memory.coordinator_bytes(shape.counts())
