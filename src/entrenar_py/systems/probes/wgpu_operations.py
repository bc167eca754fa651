"""Single operations on a wgpu adapter, compared with float64, and run with NaNs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute.wgpu import bounds, capture, program
from entrenar_py.compute.wgpu.bounds.intervals import Bounded
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import device_meter, operation_cases
from entrenar_py.systems.probes.operation_cases import CASES, Case
from entrenar_py.train.coordinator.recorder import Recorder

# The allowed relative difference of two float64 evaluations that add in different orders.
FLOAT64_SLACK = 1e-12


def run(scenario: Scenario) -> trace.Trace:
    """Record Explained and Poisoned events for each result of option `operations`, by default all.

    Without an adapter the run ends `failed`, with the reason. Raises UsageError for an operation
    that is not in CASES.
    """
    recorder = Recorder(scenario)
    names = scenario.options.get("operations", list(CASES))
    for name in names:
        if name not in CASES:
            raise UsageError(f"operations={name!r}: allowed are {', '.join(CASES)}")
    try:
        device = device_meter.open_adapter(scenario).programs.device
        for name in names:
            generator = torch.Generator().manual_seed(scenario.seed)
            for event in _tried(name, CASES[name], device, generator):
                recorder.emit(event)
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    return recorder.finish(status="completed")


def _tried(
    name: str, case: Case, device: Device, generator: torch.Generator
) -> Iterator[trace.Event]:
    """Run one operation on its operands, then again with NaNs in them; yield the events of both."""
    groups = operation_cases.operands(case, generator)
    flat = [one for group in groups for one in group]

    def compute(*given: Tensor) -> tuple[Tensor, ...]:
        usual, large = given[: case.num_operands], given[case.num_operands :]
        return tuple(operation_cases.results(case, usual, large))

    graph = capture.capture(compute, flat)
    compiled = program.compile_graph(device, graph, flat)
    outputs = [torch.from_numpy(one) for one in compiled.run([one.numpy() for one in flat])]
    exact = compute(*(one.double() for one in flat))
    allowed = bounds.bound(graph, flat)
    for number, (got, right, bounded) in enumerate(zip(outputs, exact, allowed, strict=True)):
        yield _explained(name, f"result {number}", got, right, bounded, device)
    nans = [one for group in groups for one in operation_cases.poisoned(case, group)]
    outputs = [torch.from_numpy(one) for one in compiled.run([one.numpy() for one in nans])]
    yield from _poisoned(name, outputs, compute(*nans), device)


def _explained(
    of: str, tensor: str, got: Tensor, right: Tensor, allowed: Bounded, device: Device
) -> trace.Explained:
    """Return the event for the element whose error is the largest relative to its bound."""
    assert got.shape == right.shape, f"{of}: {got.shape}"
    computed, exact = got.double().reshape(-1), right.double().reshape(-1)
    low, high, value = (
        one.double().reshape(-1) for one in (allowed.low, allowed.high, allowed.value)
    )
    known = low.isfinite() & high.isfinite()
    # An interval without the float64 value gets a bound of 0.
    room = torch.where(computed >= exact, high - value, value - low).clamp(min=0.0)
    room = room + FLOAT64_SLACK * exact.abs() * (room > 0)
    error = (computed - exact).abs().nan_to_num(torch.inf)
    used = torch.where(error == 0, 0.0, error / room)
    worst = int(torch.where(known, used, -1.0).argmax())
    return trace.Explained(
        of=of,
        tensor=tensor,
        device=device.name,
        software=device.software,
        finite=bool(computed[exact.isfinite()].isfinite().all()),
        num_elements=computed.numel(),
        num_bounded=int(known.sum()),
        element=worst,
        error=float(error[worst]) if known.any() else 0.0,
        bound=float(room[worst]) if known.any() else 0.0,
    )


def _poisoned(
    of: str, found: Sequence[Tensor], right: Sequence[Tensor], device: Device
) -> Iterator[trace.Poisoned]:
    for number, (got, expected) in enumerate(zip(found, right, strict=True)):
        wanted = expected.isnan().numpy()
        lost = wanted & ~np.isnan(got.numpy())
        yield trace.Poisoned(
            of=of,
            tensor=f"result {number}",
            device=device.name,
            software=device.software,
            reached=int(wanted.sum()),
            lost=int(lost.sum()),
            element=int(lost.argmax()) if lost.any() else None,
        )
