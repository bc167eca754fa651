"""A trace describes the process that it was recorded in."""

from __future__ import annotations

import sys

import pytest

import entrenar_py
from entrenar_py.backends import open_backend, wgpu
from entrenar_py.errors import BackendUnavailable
from entrenar_py.systems import environment

VERSIONS = {"entrenar", "python", "torch", "numpy", "platform"}


def test_versions() -> None:
    """Every library that decides bits is named with its version, as text."""
    described = environment.describe()
    assert set(described) >= VERSIONS
    assert described["entrenar"] == entrenar_py.__version__
    assert all(isinstance(value, str) and value for value in described.values())


def test_no_adapter_unless_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened no wgpu adapter names none, and opens none to say so."""
    monkeypatch.setattr(wgpu, "_opened", {})
    assert set(environment.describe()) == VERSIONS
    monkeypatch.delitem(sys.modules, "entrenar_py.backends.wgpu")
    assert set(environment.describe()) == VERSIONS
    assert "entrenar_py.backends.wgpu" not in sys.modules


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where wgpu-py is not installed, a run that asked for its backend in vain ends like others."""
    monkeypatch.setitem(sys.modules, "wgpu", None)
    monkeypatch.setattr(wgpu, "_opened", {})  # as if unopened
    with pytest.raises(BackendUnavailable, match="backend wgpu"):
        open_backend("wgpu")
    assert set(environment.describe()) == VERSIONS


@pytest.mark.wgpu
def test_opened_adapter() -> None:
    """An adapter that was opened is named, and named as software if it is."""
    try:
        backend = open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    adapter = environment.describe()["wgpu_adapter"]
    assert adapter.startswith(backend.device)
    assert adapter.endswith(", software") == backend.software
