"""The system `memory`: each worker's share is measured in its own process, which always ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import systems
from entrenar_py.compute.on_torch import open_cpu
from entrenar_py.shared import process
from entrenar_py.shared.errors import BackendUnavailable, SystemFailure
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Memory
from entrenar_py.shared.verdict import Verdict
from entrenar_py.systems.probes import memory
from entrenar_py.train.arithmetic import engine, reduction
from entrenar_py.train.arithmetic.tensors import TensorSpec
from entrenar_py.train.coordinator import models
from tests import traces

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
    """Return the ids of this process's child processes."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_every_rank_is_measured() -> None:
    """Ranks are measured one after the other, each in its own process, and all processes end."""
    before = _children()
    trace = systems.run(USUAL)
    assert trace.end.status == "completed", trace.end.reason
    assert [measured.rank for measured in trace.of(Memory)] == [0, 1]
    for measured in trace.of(Memory):
        assert measured.baseline_bytes > 2**20
        assert measured.budget_bytes == 2**31
        assert 0 <= measured.peak_bytes - measured.baseline_bytes <= measured.estimate_bytes
    assert _children() == before


CHANGES: list[dict[str, Any]] = [
    {"workload": "linear"},
    {"workload": "linear", "num_samples": 300_000, "batch_size": 300_000},
    {"workload": "decoder", "optimizer": "momentum", "accumulation": 2},
    {"workload": "decoder", "num_samples": 512, "batch_size": 512, "dropout": 0.5},
    {"optimizer": "sgd", "clip_norm": 1e-3, "weight_decay": 0.1, "num_shards": 1},
    {"optimizer": "momentum", "accumulation": 4, "dropout": 0.5, "schedule": "cosine"},
    {"num_shards": 64, "accumulation": 3, "width": 1024},
    {"width": 16, "num_shards": 64, "batch_size": 3},
    {"width": 512, "num_samples": 1600, "batch_size": 1600, "num_shards": 1, "dropout": 0.1},
]
SUBJECTS = [USUAL.with_(**{"world_size": 1, "width": 2304, **changes}) for changes in CHANGES]
# Measures each scenario in a fork of one process that has loaded torch.
ONE_BY_ONE = """
import io, os, sys
from entrenar_py.systems.probes import memory

for line in sys.stdin.read().splitlines():
    if os.fork() == 0:
        sys.stdin = io.StringIO(line)
        memory.main()
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def measured() -> dict[Scenario, Any]:
    """Return the measurement of the one worker of each of SUBJECTS."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input="\n".join(json.dumps(subject.to_dict()) for subject in SUBJECTS),
        env={**os.environ, **memory.ALLOCATOR},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(SUBJECTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS, ids=range(len(SUBJECTS)))
def test_the_estimate_bounds_the_peak(
    subject: Scenario, measured: dict[Scenario, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every workload and option the estimate covers the peak, and is not far above it."""
    monkeypatch.setattr(memory, "_measured_apart", lambda scenario: [measured[scenario]])
    finding = traces.judge("memory", [traces.run(subject)])
    assert finding.verdict is Verdict.HELD, finding


def test_the_estimate_grows_with_what_it_counts() -> None:
    """Parameters, moments, tree nodes, activations and data each add their bytes."""

    def estimated(
        num_trained: int = 1000, num_others: int = 0, rank: int = 0, **changes: Any
    ) -> int:
        specs = [
            TensorSpec("w", (num_trained,), "trainable", decayed=True),
            TensorSpec("e", (num_others,), "frozen", decayed=False),
        ]
        return memory.estimate_bytes(USUAL.with_(**changes), rank, specs)

    plain = estimated()
    assert estimated(1001) - plain == 4 * (6 + 2 + 2)
    assert estimated(num_others=10) - plain == 4 * 2 * 10
    assert plain - estimated(optimizer="sgd") == 4 * 2 * 1000
    assert estimated(width=1025) - plain == 4 * 16 * 10  # 64 samples in 4 shards
    assert estimated(width=1025, dropout=0.1) - estimated(dropout=0.1) == 4 * 16 * 14
    assert estimated(num_samples=65) - plain == 4 * 128
    # 2 + 1 shards: rank 1's come one by one; 2 nodes more for 2 micro-batches, of half the size.
    assert estimated(num_shards=3, rank=1) == estimated(num_shards=3) - 4 * 1000
    assert estimated(accumulation=2) - plain == 4 * (2 * 1000 - 8 * (10 * 1024 + 256))


@given(st.integers(0, 70), st.integers(1, 70))
def test_nodes_are_counted_as_they_fold(start: int, count: int) -> None:
    """The estimate counts as many nodes as the reduction really holds."""
    leaves = [
        reduction.Node(0, shard, np.zeros(1, np.float32), 0.0, 1.0)
        for shard in range(start, start + count)
    ]
    folded = reduction.fold(leaves, num_shards=256)
    assert reduction.num_nodes(start, start + count) == len(folded)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "dropout": 0.5, "clip_norm": 1e-3, "schedule": "linear"},
        {"workload": "linear", "batch_size": 1, "num_shards": 64, "optimizer": "sgd"},
        {"workload": "decoder", "optimizer": "momentum"},
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_share_can_be_done_in_this_process(rank: int, changes: dict[str, Any]) -> None:
    """The child's work also runs in this process, even for a rank without samples."""
    memory.work(USUAL.with_(**{"width": 8, "batch_size": 8, **changes}), rank, open_cpu())


def test_a_share_is_computed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work uses the scenario's micro-batches and dropout, since they need memory."""
    seen: list[tuple[int, bool]] = []
    shard = engine.Engine.shard

    def watched(self: engine.Engine, ids: Any, *, accumulation: int, drop: Any) -> Any:
        seen.append((accumulation, drop is engine.no_dropout))
        return shard(self, ids, accumulation=accumulation, drop=drop)

    monkeypatch.setattr(engine.Engine, "shard", watched)
    memory.work(USUAL.with_(width=8, num_steps=1), 1, open_cpu())
    memory.work(USUAL.with_(width=8, num_steps=1, accumulation=3, dropout=0.5), 1, open_cpu())
    assert seen == [(1, True)] * 2 + [(3, False)] * 2


def test_the_child_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child reports its resident bytes before the work, and the peak after it."""
    monkeypatch.setattr(Path, "write_text", lambda *_: 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    found = memory.measured(USUAL.with_(width=8), 1)
    assert 2**20 < found["baseline"] <= found["peak"]
    assert (found["planted"], found["unavailable"], found["reported"]) == (False, "", None)


def test_a_system_without_peaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without a high-water mark is an error, not a made-up number."""
    monkeypatch.setattr(Path, "read_text", lambda *_: "VmRSS: 3 kB\n")
    with pytest.raises(SystemFailure, match="has no VmHWM line"):
        memory.measure(USUAL.with_(width=8), 0)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "the process of rank 0 exited with -9: no message"),
        ("echo one >&2; echo 'MemoryError: two' >&2; exit 3", "exited with 3: MemoryError: two"),
        ("echo {}; exit 4", "the process of rank 1 exited with 4: no message"),
    ],
)
def test_a_dying_child_is_a_failed_run(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that dies by a signal, or exits with a message, fails the run."""
    _interpreter(tmp_path, monkeypatch, script)
    end = systems.run(USUAL).end
    assert end.status == "failed"
    assert message in end.reason


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is killed after its deadline, and does not remain."""
    before = _children()
    _interpreter(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(memory, "PATIENCE_S", 0.2)
    end = systems.run(USUAL).end
    assert (end.status, _children()) == ("failed", before)
    assert "took longer than 0.2 s" in end.reason


@pytest.mark.parametrize("harness", [process.deferred_interrupts, nullcontext])
def test_an_interrupt_ends_the_child_at_once(
    harness: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A real SIGINT leaves no child, output or handler behind, and is raised once."""
    before = _children()
    _interpreter(tmp_path, monkeypatch, INTERRUPTING + "exec sleep 600")
    with harness():
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            systems.run(USUAL)
        assert signal.getsignal(signal.SIGINT) is handler
        process.check_interrupts()
    assert _children() == before
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_that_is_ignored_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SIGINT is ignored, as under nohup, the child goes on."""
    _interpreter(tmp_path, monkeypatch, INTERRUPTING + ANSWER)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trace = systems.run(USUAL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert trace.end.status == "completed", trace.end.reason
    assert [measured.peak_bytes for measured in trace.of(Memory)] == [2, 2]


def test_another_thread_can_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the main thread no handler is installed, and nothing fails."""
    _interpreter(tmp_path, monkeypatch, ANSWER)
    ends = []
    thread = threading.Thread(target=lambda: ends.append(memory.run(USUAL).end.status))
    thread.start()
    thread.join()
    assert ends == ["completed"]


# Sent after the scenario was read, so that the parent is waiting.
INTERRUPTING = "cat >/dev/null; kill -INT $PPID; "
FOUND = {"baseline": 1, "peak": 2, "planted": False, "unavailable": "", "reported": None}
ANSWER = f"echo '{json.dumps(FOUND)}'\n" * 2  # a line for each rank


def _interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the Python interpreter by a shell script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_child_out_of_memory_is_a_failed_run() -> None:
    """With a width that no machine can hold, the child's last line is the reason."""
    end = systems.run(USUAL.with_(width=10**12)).end
    assert end.status == "failed"
    assert "SystemFailure: the process of rank 0 exited with 1: " in end.reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {}}, "options budget_bytes=None on system memory: use a whole number"),
        ({"options": {"budget_bytes": 2.5}}, "budget_bytes=2.5 on system memory: use a whole"),
        ({"options": {"budget_bytes": True}}, "budget_bytes=True on system memory: use a whole"),
        ({"options": {"budget_bytes": 1, "swap": 2}}, "option='swap' on system memory: allowed"),
        ({"faults": (Fault(kind="leave", rank=0, step=1),)}, "fault kind='leave' on system memory"),
        ({"stops": (1,)}, "stops=(1,) on system memory: use ()"),
        ({"detail": "values"}, "detail='values' on system memory: use 'digests'"),
        ({"backends": ("auto",)}, "backend='auto' on system memory: allowed are cuda, wgpu, cpu"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    """Options that would be ignored are refused before a process is started."""
    end = systems.run(USUAL.with_(**changes)).end
    assert end.status == "failed"
    assert message in end.reason


def test_a_device_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without its device is recorded, and the other ranks are measured."""
    answer = json.dumps({**FOUND, "unavailable": "no driver"})
    _interpreter(tmp_path, monkeypatch, f"echo '{answer}'; echo '{answer}'")
    trace = systems.run(USUAL.with_(backends=("cuda:0",)))
    assert trace.end.status == "completed"
    assert [(a.backend, a.served, a.reason) for a in trace.of(Attempt)] == [
        ("cuda:0", False, "no driver")
    ] * 2
    assert trace.of(Memory) == []


def test_a_budget_is_no_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a device reports less memory than the budget, its memory is the budget."""
    answer = json.dumps({**FOUND, "reported": 1000})
    _interpreter(tmp_path, monkeypatch, f"echo '{answer}'; echo '{answer}'")
    (measured, _) = systems.run(USUAL.with_(backends=("cuda",))).of(Memory)
    assert (measured.budget_bytes, measured.reported_bytes) == (1000, 1000)


def test_the_estimate_of_a_device_counts_its_programs() -> None:
    """An adapter has one program for each number of samples in a micro-batch."""
    specs = [TensorSpec("w", (1000,), "trainable", decayed=True)]

    def estimated(backend: str, **changes: Any) -> int:
        one = USUAL.with_(backends=(backend,), **changes)
        return memory.estimate_device_bytes(one, 0, specs) - memory.DEVICE_FIXED_BYTES

    sample = 10 * 1024 + 256
    assert estimated("wgpu") == estimated("cuda") == 4 * (3 * 1000 + 16 * sample)
    assert estimated("wgpu", accumulation=3) == 4 * (2 * 3 * 1000 + (6 + 5) * sample)
    assert estimated("cuda:1", accumulation=3) == 4 * (3 * 1000 + 6 * sample)


@pytest.mark.wgpu
@pytest.mark.parametrize("changes", [{"accumulation": 3}, {"workload": "linear", "dropout": 0.2}])
def test_the_estimate_bounds_an_adapter_s_memory(changes: dict[str, Any]) -> None:
    """The estimate covers the buffers of an adapter, which are counted until they are freed."""
    given: dict[str, Any] = {"width": 64, "batch_size": 16, "backends": ("wgpu",), **changes}
    subject = USUAL.with_(world_size=1, num_steps=1, **given)
    try:
        measured = memory.measure(subject, 0)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    grown = measured.peak_bytes - measured.baseline_bytes
    specs = models.model_of(subject).specs
    assert 0 < grown <= memory.estimate_device_bytes(subject, 0, specs)
    assert measured.reported_bytes is None
