"""The manifest of a real gradient on each backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py import backends
from entrenar_py.backends import Backend
from entrenar_py.backends.cpu import CpuBackend, open_cpu
from entrenar_py.errors import BackendUnavailable, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.systems import manifest
from entrenar_py.trace import Attempt, Manifest
from entrenar_py.training import workload


class Exhausted(CpuBackend):
    """Opens, and can't compute."""

    def linear(self, *_: Any) -> Any:
        """Fails as a full device does."""
        raise BackendUnavailable("backend cuda: out of memory")


def absent() -> Backend:
    raise BackendUnavailable("backend wgpu: no adapter")


def scenario(name: str, **changes: Any) -> Scenario:
    return Scenario(system="manifest", workload=name, world_size=1, seed=2).with_(**changes)


@pytest.mark.parametrize("name", ["linear", "mlp", "decoder"])
def test_gradients_are_the_trainable_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd leaves behind is every trainable tensor, no frozen one and no buffer."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: replace(open_cpu(), name="cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    asked = scenario(name)
    trace = manifest.run(asked)
    model = workload.build(
        name, num_samples=asked.num_samples, width=asked.width, data=asked.rng("data")
    )
    expected = [(s.name, s.shape, "float32") for s in model.specs if s.role == "trainable"]
    assert [event.backend for event in trace.of(Manifest)] == ["cpu", "cuda"]
    assert all(list(event.entries) == expected for event in trace.of(Manifest))


def test_skipped_backends_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is absent or fails while computing is skipped with its own reason."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", lambda: Exhausted("full", name="cuda"))
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)
    trace = manifest.run(scenario("linear"))
    assert [event.backend for event in trace.of(Manifest)] == ["cpu"]
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
    with pytest.raises(UsageError, match=r"options=\['m'\] on system manifest"):
        manifest.run(scenario("linear", options={"m": 3}))
