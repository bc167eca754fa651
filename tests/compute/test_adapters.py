"""The choice of an adapter, the door to wgpu-py, and what becomes of a driver that crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.compute import adapters, chain
from entrenar_py.compute.adapters import PROVEN, Probe, choose, ranked
from entrenar_py.compute.wgpu.device import LIMITS, open_device
from entrenar_py.shared.errors import BackendUnavailable

DIES = "import os\nos.kill(os.getpid(), 11)\n"


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
    with pytest.raises(BackendUnavailable, match=r"install it with pip install .*wgpu"):
        open_device(0)


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process one that has opened no adapter yet."""
    monkeypatch.delenv(PROVEN, raising=False)
    adapters.probe.cache_clear()
    yield
    adapters.probe.cache_clear()


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Let children of this process find `modules`, name -> source, before those installed."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.usefixtures("unproven")
def test_a_crash_while_modules_are_loaded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton that kills its process makes wgpu unavailable, and the chain goes on with why."""
    pytest.importorskip("wgpu")
    plant(tmp_path, monkeypatch, triton=DIES)
    attempts: list[chain.Attempt] = []
    one = torch.ones(1, 1)
    backend, _ = chain.first_finite(
        lambda each: each.matmul(one, one), on_attempt=attempts.append, order=("wgpu", "cpu")
    )
    assert backend.name == "cpu"
    assert attempts[0].reason == (
        "a child process that tried to load triton and wgpu crashed: signal SIGSEGV; "
        "update the driver, or use another backend"
    )
    assert PROVEN not in os.environ


@pytest.mark.usefixtures("unproven")
def test_a_crash_of_an_adapter_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that kills whoever opens it is named with the signal, and can still be listed."""
    pytest.importorskip("wgpu")
    plant(
        tmp_path,
        monkeypatch,
        wgpu="import os\n"
        "class gpu:\n"
        "    info = dict(device='Brittle', backend_type='Vulkan', adapter_type='CPU')\n"
        "    enumerate_adapters_sync = lambda: [gpu]\n"
        "    request_device_sync = lambda: os.abort()\n",
    )
    crash = r"tried to open the adapter Brittle \(Vulkan\) crashed: signal SIGABRT"
    monkeypatch.setattr(adapters, "found", lambda: [FakeAdapter("CPU")])
    with pytest.raises(BackendUnavailable, match=crash):
        open_device(0)
    assert adapters.probe(0).is_listed


@pytest.mark.usefixtures("unproven")
def test_the_doctor_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`entrenar doctor` ends with 0 and says which signal keeps wgpu from serving.

    It does so in a process that opened an adapter before its driver broke, too.
    """
    pytest.importorskip("wgpu")
    before = SimpleNamespace(device="llvmpipe", software=True)
    monkeypatch.setattr("entrenar_py.compute.wgpu.opened", lambda: [before])
    plant(tmp_path, monkeypatch, triton=DIES)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.split()[:2] == ["wgpu", "no"])
    assert "crashed: signal SIGSEGV" in row


@pytest.mark.wgpu
@pytest.mark.usefixtures("unproven")
def test_one_child_a_family_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that worked in a child is proven for this process and for all that it starts."""
    pytest.importorskip("wgpu")
    assert adapters.probe(0) == Probe()
    assert os.environ[PROVEN] == "0"
    adapters.probe.cache_clear()
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    assert adapters.probe(0) == Probe()


def test_the_child_loads_triton_first_and_no_torch(tmp_path: Path) -> None:
    """A child in the parent's order, and a quick one; a Triton that can't be loaded is no crash."""
    (tmp_path / "triton.py").write_text(
        "import atexit, sys\n"
        "print('wgpu first' if 'wgpu' in sys.modules else 'triton first')\n"
        "atexit.register(lambda: print('torch' if 'torch' in sys.modules else 'no torch'))\n"
        "raise TypeError('no driver')\n"
    )
    (tmp_path / "wgpu.py").write_text("class gpu:\n    enumerate_adapters_sync = lambda: []\n")
    child = subprocess.run(
        [sys.executable, "-P", "-m", "entrenar_py.compute.adapters", "0"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert child.stdout.split("\n")[:-1] == [
        "load triton and wgpu",
        "triton first",
        "list the adapters",
        "no torch",
    ]
    assert "no adapter on this machine" in child.stderr


def test_a_triton_that_can_not_be_loaded_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broken Triton raises is a note, whatever it is."""
    (tmp_path / "triton.py").write_text("raise TypeError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert adapters.triton_failure.__wrapped__() == "TypeError: no driver"
