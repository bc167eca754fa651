"""Facts about the machine on which these tests run."""

from __future__ import annotations

import sys

import pytest
import torch

from entrenar_py import compute as backends
from entrenar_py.compute import machine
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.shared.errors import BackendUnavailable


def test_versions_are_those_imported() -> None:
    """Versions are those of the imported packages; a missing package has an entry, too."""
    versions = machine.versions()
    assert versions["torch"] == torch.__version__
    assert {*machine.PACKAGES, "python", "nccl", "gloo", "cuda runtime", "wgpu_native"} <= {
        *versions
    }
    assert all(versions.values())


def test_the_cpu_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU always works; other backends work or have a reason."""
    monkeypatch.setitem(sys.modules, "wgpu", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cpu, *others = machine.found()
    assert (cpu.name, cpu.serves, cpu.device) == ("cpu", True, open_cpu().device)
    assert [one.name for one in others] == ["cuda", "wgpu"]
    assert "install it with pip install 'wgpu>=" in others[1].reason
    assert not others[1].serves


def test_a_gpu_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that doesn't start is reported with the driver's message, and the rest is examined."""

    def busy(index: int) -> None:
        raise RuntimeError(f"device {index} is busy or unavailable")

    monkeypatch.setitem(sys.modules, "wgpu", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", busy)
    found = {one.name: one.reason for one in machine.found()}
    assert list(found) == ["cpu", "cuda:0", "cuda:1", "wgpu"]
    assert found["cuda:1"] == "device 1 is busy or unavailable"


def test_a_wrong_product_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that opens but miscomputes counts as not working."""

    class Wrong(type(open_cpu())):  # type: ignore[misc]
        def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a @ b) * 2

    monkeypatch.setitem(backends.BACKENDS, "cpu", lambda: Wrong("x86"))
    found = machine.found()[0]
    assert (found.name, found.serves, found.device) == ("cpu", False, "x86")
    assert "rounding explains" in found.reason


@pytest.mark.wgpu
def test_adapters_are_told_with_their_limits() -> None:
    """Each adapter has the name for `--backend`, and the limits that bound a step."""
    found = [one for one in machine.found() if one.name.startswith("wgpu")]
    if not found[0].serves:
        pytest.skip(found[0].reason)
    assert [one.name for one in found] == [f"wgpu:{index}" for index in range(len(found))]
    assert found[0].device == backends.open_backend("wgpu").device
    assert set(found[0].facts["limits"]) == set(machine.LIMITS)
    with pytest.raises(BackendUnavailable, match=r"this machine has wgpu:0 "):
        backends.open_backend(f"wgpu:{len(found)}")
