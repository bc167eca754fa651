"""The backends of a run are opened once, by name or as the first that works in the chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.compute import Backend
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Start, Trace, Update

# The systems with all workers in one process; in others each process opens its own backend.
TRAINERS = ("reference", "textbook")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have no CUDA, and the CPU under wgpu's name; return the names opened, in order."""
    names: list[str] = []

    def opener(name: str) -> Callable[[], Backend]:
        def open_backend() -> Backend:
            names.append(name)
            if name == "cuda":
                raise BackendUnavailable("backend cuda: none here")
            return replace(open_cpu(), name=name, device=f"{name} of a test")

        return open_backend

    for name in tuple(backends.BACKENDS):
        monkeypatch.setitem(backends.BACKENDS, name, opener(name))
    return names


def run(system: str, *names: str, **changes: Any) -> Trace:
    """Run two steps of three workers on the backends `names` in turn."""
    usual: dict[str, Any] = {"workload": "linear", "world_size": 3, "seed": 0, "num_steps": 2}
    return systems.run(Scenario(system=system, backends=names, **{**usual, **changes}))


def weights(trace: Trace) -> list[Any]:
    """Return the weights of every worker after every step."""
    return [update.weights for update in trace.of(Update)]


@pytest.mark.parametrize("system", TRAINERS)
def test_auto_falls_back_and_says_so(system: str, opened: list[str]) -> None:
    """Every attempt is recorded with its reason before training; the last one served."""
    trace = run(system, "auto")
    assert trace.end.status == "completed", trace.end.reason
    tries = [(event.backend, event.served) for event in trace.of(Attempt)]
    assert tries == [("cuda", False), ("wgpu", True)]
    assert "none here" in trace.of(Attempt)[0].reason
    assert trace.of(Attempt)[1].device == "wgpu of a test"
    assert list(trace.events[:2]) == trace.of(Attempt)
    assert weights(trace) == weights(run(system, "wgpu"))


@pytest.mark.parametrize("system", TRAINERS)
def test_a_name_never_falls_back(system: str, opened: list[str]) -> None:
    """The run fails with the backend's own reason, and no other backend was opened."""
    end = run(system, "cuda").end
    assert (end.status, opened) == ("failed", ["cuda"])
    assert "BackendUnavailable: backend cuda: none here" in end.reason


@pytest.mark.parametrize("system", TRAINERS)
def test_a_name_is_opened_once(system: str, opened: list[str]) -> None:
    """A backend is opened once, for any number of workers and stops."""
    trace = run(system, "cpu", "wgpu", stops=(1,))
    assert len(trace.of(Start)) == 6
    assert opened == ["cpu", "wgpu"]
    assert trace.of(Attempt) == []


def test_bits_are_promised_by_who_served(opened: list[str]) -> None:
    """Two names of one backend promise bits; two backends do not."""
    assert run("reference", "auto", "wgpu").promises == ("bitwise",)
    assert run("reference", "auto", "cpu").promises == ("draws",)
    assert run("reference", "cpu", "auto", world_size=1).promises == ("bitwise",)


def test_when_no_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails with the reasons of all backends."""

    def absent() -> Backend:
        raise BackendUnavailable("away")

    for name in tuple(backends.BACKENDS):
        monkeypatch.setitem(backends.BACKENDS, name, absent)
    end = run("reference", "auto").end
    assert end.status == "failed"
    assert "no backend of cuda, wgpu, cpu works: cuda: away" in end.reason
