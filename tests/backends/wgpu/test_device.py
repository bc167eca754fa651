"""The choice of an adapter, and the message when none can be opened."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from entrenar_py.backends.wgpu import WgpuBackend, open_wgpu
from entrenar_py.backends.wgpu.adapters import choose, ranked
from entrenar_py.backends.wgpu.device import LIMITS, open_device
from entrenar_py.errors import BackendUnavailable


@dataclass
class FakeAdapter:
    """An adapter with its kind, which fails to open."""

    adapter_type: str
    backend_type: str = "Vulkan"
    name: str = ""
    limits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 1))

    @property
    def info(self) -> dict[str, str]:
        """The adapter's info in the format of wgpu."""
        return {
            "adapter_type": self.adapter_type,
            "backend_type": self.backend_type,
            "device": self.name,
        }

    def request_device_sync(self, **_: Any) -> None:
        """Raise the error of a driver that fails."""
        raise RuntimeError("device lost")


def test_hardware_before_software_before_opengl() -> None:
    """Hardware comes before software, and OpenGL last, in whatever order adapters are listed."""
    software, hardware = FakeAdapter("CPU"), FakeAdapter("DiscreteGPU")
    opengl = FakeAdapter("IntegratedGPU", "OpenGL")
    assert ranked([opengl, software, hardware]) == [hardware, software, opengl]


def test_equals_keep_their_order() -> None:
    """With several GPUs, `wgpu:0` is the one that the driver lists first."""
    first, second = FakeAdapter("DiscreteGPU", name="one"), FakeAdapter("DiscreteGPU", name="two")
    assert [one.name for one in ranked([first, FakeAdapter("CPU"), second])][:2] == ["one", "two"]


def test_an_index_beyond_the_last() -> None:
    """The message for a missing adapter lists the names of those that exist."""
    there = [FakeAdapter("DiscreteGPU", name="one"), FakeAdapter("CPU", name="two")]
    assert choose(there, 1) is there[1]
    listed = r"backend wgpu:2: this machine has wgpu:0 one \(Vulkan\), wgpu:1 two \(Vulkan\)"
    with pytest.raises(BackendUnavailable, match=listed):
        choose(there, 2)


def test_no_adapter() -> None:
    """The message on a machine without adapters says what to install."""
    with pytest.raises(BackendUnavailable, match="no adapter on this machine; install"):
        choose([], 0)


def test_wgpu_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message without wgpu-py says how to install it."""
    monkeypatch.setitem(sys.modules, "wgpu", None)
    with pytest.raises(BackendUnavailable, match=r"entrenar-py\[wgpu\]"):
        open_device(0)


def test_adapter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message for an adapter that fails to open has wgpu's error."""
    wgpu = pytest.importorskip("wgpu")
    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", lambda: [FakeAdapter("CPU")])
    with pytest.raises(BackendUnavailable, match="backend wgpu: device lost"):
        open_device(0)


@pytest.mark.wgpu
def test_clean_exit(wgpu_backend: WgpuBackend) -> None:
    """A process that used the device ends without a warning or an exception."""
    code = (
        "import torch\n"
        "from entrenar_py.backends import open_backend\n"
        "print(float(open_backend('wgpu').matmul(torch.ones(1, 2), torch.ones(2, 1))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert wgpu_backend.device


@pytest.mark.wgpu
def test_a_lost_device_is_opened_again(wgpu_backend: WgpuBackend) -> None:
    """A destroyed device fails with wgpu's message, and opening the backend gives a new one."""
    assert wgpu_backend.device
    first = open_wgpu(0)
    assert open_wgpu(0) is first
    one = torch.ones(1, 1)
    first._device.handle.destroy()
    with pytest.raises(BackendUnavailable, match=r"backend wgpu on .*(?s:.*)device is lost"):
        first.matmul(one, one)
    second = open_wgpu(0)
    assert second is not first
    assert float(second.matmul(one, one)) == 1.0
