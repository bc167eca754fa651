"""The opening of an adapter, and the end of a process that did it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from entrenar_py.compute.wgpu import WgpuBackend, open_wgpu
from entrenar_py.compute.wgpu.device import open_device
from entrenar_py.shared.errors import BackendUnavailable
from tests.compute.test_adapters import FakeAdapter


def test_adapter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message for an adapter that fails to open has wgpu's error."""
    wgpu = pytest.importorskip("wgpu")
    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", lambda: [FakeAdapter("CPU")])
    with pytest.raises(BackendUnavailable, match="backend wgpu: device lost"):
        open_device(0)


@pytest.mark.wgpu
def test_clean_exit(wgpu_backend: WgpuBackend, tmp_path: Path) -> None:
    """A process that used the device ends without a warning, also if Triton is loaded afterwards.

    This Triton ends a process that has loaded wgpu before, as Mesa's and Triton's LLVM do.
    """
    (tmp_path / "triton.py").write_text(
        "import os, sys\nif 'wgpu' in sys.modules: os.kill(os.getpid(), 11)\n"
    )
    code = (
        "import torch\n"
        "from entrenar_py.compute import open_backend\n"
        "print(float(open_backend('wgpu').matmul(torch.ones(1, 2), torch.ones(2, 1))))\n"
        "import triton\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
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
