"""A trace describes the process in which it was recorded."""

from __future__ import annotations

import sys

import pytest

import entrenar_py
from entrenar_py.compute import open_backend, wgpu
from entrenar_py.shared import process
from entrenar_py.shared.errors import BackendUnavailable

VERSIONS = {"entrenar", "python", "torch", "numpy", "platform"}


def test_versions() -> None:
    """The version of every library that affects bits is recorded, as text."""
    described = process.environment()
    assert set(described) >= VERSIONS
    assert described["entrenar"] == entrenar_py.__version__
    assert all(isinstance(value, str) and value for value in described.values())


def test_no_adapter_unless_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an open adapter none is named, and none is opened for the description."""
    monkeypatch.setattr(wgpu, "_opened", {})
    assert set(process.environment()) == VERSIONS
    monkeypatch.delitem(sys.modules, "entrenar_py.compute.wgpu")
    assert set(process.environment()) == VERSIONS
    assert "entrenar_py.compute.wgpu" not in sys.modules


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wgpu-py, a run that requested its backend still ends with a description."""
    monkeypatch.setitem(sys.modules, "wgpu", None)
    monkeypatch.setattr(wgpu, "_opened", {})  # as if none were open
    with pytest.raises(BackendUnavailable, match="backend wgpu"):
        open_backend("wgpu")
    assert set(process.environment()) == VERSIONS


@pytest.mark.wgpu
def test_opened_adapter() -> None:
    """An open adapter is named, and marked if it is a software one."""
    try:
        backend = open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    adapter = process.environment()["wgpu_adapter"]
    assert adapter.startswith(backend.device)
    assert adapter.endswith(", software") == backend.software
