"""The system `matmul`, which multiplies matrices on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.compute.wgpu import open_wgpu
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Product
from entrenar_py.systems.probes import products


def scenario(**changes: Any) -> Scenario:
    return Scenario(system="matmul", workload="linear", world_size=1, seed=1).with_(**changes)


@pytest.mark.parametrize(
    ("named", "compared"),
    [
        (("cpu",), "wgpu"),
        (("wgpu",), "wgpu"),
        (("cuda", "wgpu"), "cuda"),
        (("cpu", "cuda"), "cuda"),
    ],
)
def test_the_cpu_is_the_other_side(named: tuple[str, ...], compared: str) -> None:
    """The CPU is never compared with itself."""
    assert products.compared_backend(scenario(backends=named)) == compared


def test_one_event_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each requested shape gives one event, in order, from the named backend."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: replace(open_cpu(), name="cuda"))
    shapes = [[2, 3, 4], [17, 1, 5]]
    trace = products.run(
        scenario(backends=("cuda",), options={"shapes": shapes, "layout": "b_transposed"})
    )
    recorded = trace.of(Product)
    assert [list(product.shape) for product in recorded] == shapes
    assert {(p.backend, p.layout, p.finite) for p in recorded} == {("cuda", "b_transposed", True)}
    assert trace.end.status == "completed"


def test_absent_device_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the device the run fails with the device's own reason, and has no product."""

    def absent() -> Backend:
        raise BackendUnavailable("backend wgpu: no adapter on this machine")

    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    trace = products.run(scenario())
    assert (trace.end.status, trace.of(Product)) == ("failed", [])
    assert trace.end.reason == "backend wgpu: no adapter on this machine"


@pytest.mark.wgpu
def test_on_the_adapter() -> None:
    """On a real adapter several products take one submission and lie within their bounds."""
    try:
        backend = open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    before = backend.submissions
    trace = products.run(scenario(options={"shapes": [[5, 3, 2], [64, 64, 64], [1, 1024, 7]]}))
    assert backend.submissions == before + 1
    recorded = trace.of(Product)
    assert len(recorded) == 3
    assert all(p.backend == "wgpu" and p.error_f64 <= p.bound for p in recorded)
    assert "wgpu_adapter" in trace.environment
