"""The process of a command: its begin, its interrupts, and what it runs on."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

import entrenar_py
from entrenar_py.compute import open_backend, wgpu
from entrenar_py.shared import process
from entrenar_py.shared.errors import BackendUnavailable


@pytest.mark.parametrize("command", ["entrenar_py.check.cli", "entrenar_py.entrenar"])
def test_no_crash_is_silent(command: str) -> None:
    """A command that dies of a signal has said which one, and in which line it was."""
    code = (
        f"import os, sys\nfrom {command} import main\nsys.argv[1:] = ['--no-such-option']\n"
        "main()\nos.kill(os.getpid(), 11)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert 'File "<string>", line 5' in done.stderr


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


def press_ctrl_c() -> None:
    """Send this process a real SIGINT."""
    signal.raise_signal(signal.SIGINT)


def test_the_first_waits_for_a_safe_place() -> None:
    """The signal raises nothing on arrival, and KeyboardInterrupt once, at the next check."""
    with process.deferred_interrupts():
        process.check_interrupts()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            process.check_interrupts()
        process.check_interrupts()


def test_the_second_does_not_wait() -> None:
    """A second Ctrl-C raises at once."""
    with process.deferred_interrupts():
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_another_thread_leaves_it_for_the_main_one() -> None:
    """Each thread that checks is interrupted, so none goes on because another checked first."""
    raised = list[int]()

    def check() -> None:
        try:
            process.check_interrupts()
        except KeyboardInterrupt:
            raised.append(1)

    with process.deferred_interrupts():
        press_ctrl_c()
        for thread in [threading.Thread(target=check) for _ in range(2)]:
            thread.start()
            thread.join()
        with pytest.raises(KeyboardInterrupt):
            process.check_interrupts()
        check()
    assert len(raised) == 2


def test_the_handler_goes() -> None:
    """Afterwards Python's own handler is back, and a noted signal is forgotten."""
    before = signal.getsignal(signal.SIGINT)
    with process.deferred_interrupts():
        press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before
    process.check_interrupts()


def test_ignored_stays_ignored() -> None:
    """A signal that is ignored, as under nohup, stays ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with process.deferred_interrupts():
            press_ctrl_c()
            process.check_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread() -> None:
    """Outside the main thread no handler is installed, and nothing fails."""
    seen = []

    def inside() -> None:
        with process.deferred_interrupts():
            process.check_interrupts()
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]
