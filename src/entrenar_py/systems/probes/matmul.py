"""Matrix products on a device, each compared with the CPU's float32 and with float64."""

from __future__ import annotations

from entrenar_py import backends, trace
from entrenar_py.errors import BackendUnavailable
from entrenar_py.scenario import Scenario
from entrenar_py.systems.probes import products
from entrenar_py.systems.recorder import Recorder


def run(scenario: Scenario) -> trace.Trace:
    """One Product event per product of the options; all computed in one submission.

    The run is `failed`, with the reason, when the device is not there or can't do it. Raises
    UsageError for options no product can have.
    """
    wanted = products.request(scenario.options)
    recorder = Recorder(scenario)
    pairs = products.operands(scenario, wanted)
    try:
        backend = backends.open_backend(compared_backend(scenario))
        results = backend.products(pairs)
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    for pair, result in zip(pairs, results, strict=True):
        recorder.emit(products.measure(backend, pair, result, wanted))
    return recorder.finish(status="completed")


def compared_backend(scenario: Scenario) -> str:
    """The scenario's first backend that is not the CPU; `wgpu` if it names no other.

    The CPU is always the other side: compared with itself it would show nothing.
    """
    return next((name for name in scenario.backends if name != "cpu"), "wgpu")
