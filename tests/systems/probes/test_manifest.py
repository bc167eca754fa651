"""The manifest of a real gradient on each backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.compute import Backend
from entrenar_py.compute.on_torch import CpuBackend, open_cpu
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Manifest
from entrenar_py.systems.probes import manifest
from entrenar_py.train.arithmetic import workload


class Exhausted(CpuBackend):
    """A backend that opens and can't compute."""

    def stepper(self, *_: Any, **__: Any) -> Any:
        """Raise the error of a device without memory."""

        def step(*_: Any) -> Any:
            raise BackendUnavailable("backend cuda: out of memory")

        return step


class Wide(CpuBackend):
    """A backend that returns float64."""

    def stepper(self, *given: Any, **named: Any) -> Any:
        """Return the gradients in float64."""
        right = super().stepper(*given, **named)

        def step(*asked: Any) -> Any:
            loss, arrays = right(*asked)
            return loss, [array.astype(np.float64) for array in arrays]

        return step


def absent() -> Backend:
    raise BackendUnavailable("backend wgpu: no adapter")


def scenario(name: str, **changes: Any) -> Scenario:
    backends_tried = ("cpu", "wgpu", "cuda")
    return Scenario(
        system="manifest", workload=name, world_size=1, seed=2, backends=backends_tried
    ).with_(**changes)


@pytest.mark.parametrize("name", ["linear", "mlp", "decoder"])
def test_gradients_are_the_trainable_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trainable tensor is declared and sent; frozen tensors and buffers are not."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: replace(open_cpu(), name="cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    asked = scenario(name)
    trace = manifest.run(asked)
    model = workload.build(
        name, num_samples=asked.num_samples, width=asked.width, data=asked.rng("data")
    )
    expected = [(s.name, s.shape, "float32") for s in model.specs if s.role == "trainable"]
    assert [event.backend for event in trace.of(Manifest)] == ["model", "cpu", "cuda"]
    assert all(list(event.entries) == expected for event in trace.of(Manifest))


def test_skipped_backends_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is absent or fails while computing is skipped with its own reason."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: Exhausted("full", name="cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    trace = manifest.run(scenario("linear"))
    assert [event.backend for event in trace.of(Manifest)] == ["model", "cpu"]
    assert [(a.backend, a.served, a.reason) for a in trace.of(Attempt)] == [
        ("wgpu", False, "backend wgpu: no adapter"),
        ("cuda", False, "backend cuda: out of memory"),
    ]


@pytest.mark.wgpu
def test_on_the_adapter() -> None:
    """A real adapter yields the CPU's manifest for the deepest workload."""
    trace = manifest.run(scenario("decoder"))
    by_name = {event.backend: event for event in trace.of(Manifest)}
    if "wgpu" not in by_name:
        pytest.skip(next(a.reason for a in trace.of(Attempt) if a.backend == "wgpu"))
    assert by_name["wgpu"].entries == by_name["cpu"].entries


def test_options_are_refused() -> None:
    """Options that would be ignored are refused."""
    end = systems.run(scenario("linear", options={"m": 3})).end
    assert "option='m' on system manifest: allowed are none" in end.reason


def test_only_the_backends_asked_for() -> None:
    """A backend that the scenario leaves out is not opened."""
    trace = manifest.run(scenario("linear", backends=("cpu",)))
    assert [event.backend for event in trace.of(Manifest)] == ["model", "cpu"]
    assert trace.of(Attempt) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda arrays: arrays[::-1], [("weight", (1,)), ("bias", (1, 1))]),
        (lambda arrays: arrays[:1], [("weight", (1, 1))]),
        (
            lambda arrays: [*arrays, arrays[1]],
            [("weight", (1, 1)), ("bias", (1,)), ("without a name", (1,))],
        ),
    ],
)
def test_what_is_sent_is_what_gradients_gives(
    change: Callable[[list[Any]], list[Any]],
    expected: list[tuple[str, tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays get names in order, as at a receiver; missing and extra arrays show."""
    right = workload.LinearRegression.gradients

    def wrong(*args: Any, **named: Any) -> tuple[float, list[Any]]:
        loss, arrays = right(*args, **named)
        return loss, change(arrays)

    monkeypatch.setattr(workload.LinearRegression, "gradients", wrong)
    sent = manifest.run(scenario("linear", backends=("cpu",))).of(Manifest)[1]
    assert [(name, shape) for name, shape, _ in sent.entries] == expected


def test_a_wider_backend_shows() -> None:
    """If a backend computes in float64, the gradients that are sent are float64."""
    asked = scenario("linear")
    model = workload.build("linear", num_samples=asked.num_samples, width=1, data=asked.rng("data"))
    entries = manifest.sent(asked, model, Wide("wide"))
    assert [dtype for _, _, dtype in entries] == ["float64", "float64"]
