"""One worker's share in a process of its own: measured, bounded, and never left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.errors import SystemFailure, UsageError
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.systems import memory
from entrenar_py.trace import Memory

USUAL = Scenario(
    system="memory",
    workload="mlp",
    world_size=2,
    seed=0,
    num_shards=4,
    num_samples=64,
    batch_size=64,
    num_steps=2,
    width=1024,
    optimizer="adamw",
    options={"budget_bytes": 2**31},
)


def _children() -> set[str]:
    """Process ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "sgd", "num_shards": 1, "world_size": 1}, {"workload": "linear"}]
)
def test_the_estimate_bounds_the_peak(changes: dict[str, Any]) -> None:
    """What is needed above the interpreter stays below what was estimated beforehand."""
    before = _children()
    trace = systems.run(USUAL.with_(**changes))
    assert trace.end.status == "completed", trace.end.reason
    (measured,) = trace.of(Memory)
    assert 0 <= measured.peak_bytes - measured.baseline_bytes <= measured.estimate_bytes
    assert measured.baseline_bytes > 2**20
    assert measured.budget_bytes == 2**31
    assert _children() == before


def test_the_estimate_grows_with_what_it_counts() -> None:
    """Parameters, moments, tree nodes, activations: each by its bytes."""
    plain = memory.estimate_bytes(USUAL, 1000, 10)
    assert memory.estimate_bytes(USUAL, 1001, 10) - plain == 4 * (8 + 2 + 3)
    assert memory.estimate_bytes(USUAL, 1000, 11) - plain == 4 * 16  # 64 samples in 4 shards
    assert plain - memory.estimate_bytes(USUAL.with_(optimizer="sgd"), 1000, 10) == 4 * 2 * 1000
    assert (
        memory.estimate_bytes(USUAL.with_(num_shards=8), 1000, 0)
        - memory.estimate_bytes(USUAL, 1000, 0)
        == 4 * 1000
    )


def test_the_share_can_be_done_in_this_process() -> None:
    """The child's own work, without its measurement."""
    memory.work(USUAL.with_(width=8))


def test_the_child_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baseline before, peak after, estimate in between; nothing is reset in this process."""
    monkeypatch.setattr(Path, "write_text", lambda *_: 0)
    measured = memory.measure(USUAL.with_(width=8))
    assert 0 < measured["baseline_bytes"] <= measured["peak_bytes"]
    assert measured["estimate_bytes"] > memory.FIXED_BYTES


def test_a_system_without_peaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel keeps no high-water mark nothing is made up."""
    monkeypatch.setattr(Path, "read_text", lambda *_: "VmRSS: 3 kB\n")
    with pytest.raises(SystemFailure, match="has no VmHWM line"):
        memory.measure(USUAL.with_(width=8))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "the worker's process exited with -9: no message"),
        ("echo one >&2; echo 'MemoryError: two' >&2; exit 3", "exited with 3: MemoryError: two"),
    ],
)
def test_a_dying_child_is_a_failed_run(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, or with a last word."""
    _interpreter(tmp_path, monkeypatch, script)
    end = systems.run(USUAL).end
    assert end.status == "failed"
    assert message in end.reason


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its deadline, and it is not left behind."""
    before = _children()
    _interpreter(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(memory, "DEADLINE_S", 0.2)
    end = systems.run(USUAL).end
    assert (end.status, _children()) == ("failed", before)
    assert "took longer than 0.2 s" in end.reason


def _interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in the interpreter's place."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_child_out_of_memory_is_a_failed_run() -> None:
    """A width no machine can hold: the child's own last line is the reason."""
    end = systems.run(USUAL.with_(width=10**9)).end
    assert end.status == "failed"
    assert "SystemFailure: the worker's process exited with 1: " in end.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {}},
        {"options": {"budget_bytes": 2.5}},
        {"options": {"budget_bytes": True}},
        {"options": {"budget_bytes": 1, "swap": 2}},
        {"faults": (Fault(kind="leave", rank=0, step=1),)},
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any]) -> None:
    """Before a process is started."""
    with pytest.raises(UsageError, match="on system memory: it takes no faults, and budget_bytes"):
        memory.run(USUAL.with_(**changes))
