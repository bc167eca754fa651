"""One suite for the steps of all backends, which are compared with the CPU's."""

from __future__ import annotations

import gc
import platform
import sys
from dataclasses import replace
from functools import cache
from weakref import ref

import numpy as np
import pytest
import torch

from entrenar_py.compute import Array, Backend, on_torch, open_backend
from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.train.arithmetic import engine, workload
from entrenar_py.train.arithmetic.engine import Engine
from entrenar_py.train.arithmetic.tensors import Workload

SCALE = 2.0**-5
IDS = [3, 1, 4, 15]
# With dropout if the model has any. All tests share the programs, because compiling takes the most
# time.
RATES = {"linear": 0.0, "mlp": 0.3, "decoder": 0.3, "vectors": 0.0}


@cache
def _workload(name: str) -> Workload:
    return workload.build(name, num_samples=24, width=8, data=np.random.default_rng(0))


def _engine(backend: Backend, name: str) -> Engine:
    """Return an engine with random weights: as LoRA's B starts at 0, so does A's gradient."""
    model = _workload(name)
    rng = np.random.default_rng(1)
    values = {
        name: (value + rng.normal(0, 0.1, value.shape)).astype(np.float32)
        for name, value in model.initial(rng).items()
    }
    return Engine(model, backend, values, scale=SCALE)


def _shard(replica: Engine, ids: list[int] | None = None) -> tuple[Array, float]:
    rate = RATES[replica.workload.name]
    drop = engine.Dropout(rate, np.random.default_rng(2)) if rate else engine.no_dropout
    vector, loss, _ = replica.shard(ids or IDS, accumulation=1, drop=drop)
    return vector, loss


def _assert_near(
    replica: Engine, found: tuple[Array, float], expected: tuple[Array, float]
) -> None:
    """Require each tensor's errors to be below a thousand roundings of its largest element."""
    for name, part in replica.layout.trainable.items():
        error = np.abs(found[0][part] - expected[0][part]).max()
        assert error <= 1000 * 2.0**-23 * np.abs(expected[0][part]).max(), name
    assert found[1] == pytest.approx(expected[1], rel=1000 * 2.0**-23)


@pytest.mark.parametrize("name", RATES)
def test_a_step_is_the_cpu_s(backend: Backend, name: str) -> None:
    """A step gives the CPU's loss and gradients, in the model's order, also with dropout."""
    ours, theirs = _engine(backend, name), _engine(open_backend("cpu"), name)
    _assert_near(theirs, _shard(ours), _shard(theirs))


def test_a_step_sees_what_training_changed(backend: Backend) -> None:
    """A step uses the current weights and buffers after training changed them."""
    ours, theirs = _engine(backend, "mlp"), _engine(open_backend("cpu"), "mlp")
    for replica in (ours, theirs):
        _shard(replica)
        replica.parameters *= np.float32(0.5)
        for buffer in replica.buffers.values():
            buffer += np.float32(0.25)
        replica.changed()
    _assert_near(theirs, _shard(ours), _shard(theirs))


@pytest.mark.parametrize("name", RATES)
def test_a_step_twice_has_the_same_bits(backend: Backend, name: str) -> None:
    """A step gives the same bits again, also on another replica with the same weights."""
    vector, loss = _shard(_engine(backend, name))
    again, same = _shard(_engine(backend, name))
    assert (vector.tobytes(), loss) == (again.tobytes(), same)


@pytest.mark.wgpu
def test_a_second_step_compiles_nothing(wgpu_backend: WgpuBackend) -> None:
    """Replicas share one program for each number of samples, with frozen tensors uploaded once.

    A step takes one submission and one read-back.
    """
    _shard(_engine(wgpu_backend, "decoder"))
    known = wgpu_backend.programs.of(_workload("decoder")).programs
    (program,) = known.values()
    before = replace(program.counts)
    replica = _engine(wgpu_backend, "decoder")
    _shard(replica, ids=[5, 6, 7, 8])
    counts = program.counts
    assert len(known) == 1
    assert (counts.runs, counts.pipelines) == (before.runs + 1, before.pipelines)
    assert counts.submissions == counts.read_backs == counts.uploads == counts.runs
    frozen = sum(a.nbytes for name, a in replica.arrays.items() if "lora" not in name)
    assert (counts.upload_bytes - before.upload_bytes) < frozen


@pytest.mark.wgpu
def test_programs_go_with_their_workload(wgpu_backend: WgpuBackend) -> None:
    """The programs of a workload are dropped with it."""
    model = workload.build("linear", num_samples=4, width=1, data=np.random.default_rng(0))
    replica = Engine(model, wgpu_backend, model.initial(np.random.default_rng(1)), scale=1.0)
    replica.shard([0, 1], accumulation=1, drop=engine.no_dropout)
    gone = ref(next(iter(wgpu_backend.programs.of(model).programs.values())))
    del model, replica
    gc.collect()
    assert gone() is None


def test_a_step_leaves_its_tensors_alone(backend: Backend) -> None:
    """A step changes no weight, and its results are new arrays."""
    replica = _engine(backend, "linear")
    before = {name: array.tobytes() for name, array in replica.arrays.items()}
    step = backend.stepper(replica.workload, replica.tensors, scale=SCALE)
    _, parts = step(IDS, engine.no_dropout)
    kept = [part.copy() for part in parts]
    _, others = step([5, 6, 7, 8], engine.no_dropout)
    for part, other, copy in zip(parts, others, kept, strict=True):
        assert not np.shares_memory(part, other)
        assert np.array_equal(part, copy)
    assert {name: array.tobytes() for name, array in replica.arrays.items()} == before
    assert all(tensor.grad is None for tensor in replica.tensors.values())
    assert all(tensor.device == torch.device("cpu") for tensor in replica.tensors.values())


@pytest.mark.parametrize(
    ("setting", "system", "is_configured"),
    [
        (None, "6.8.0-generic", True),
        (None, "5.15.0-microsoft-standard-WSL2", False),
        ("PYTORCH_ALLOC_CONF", "6.8.0-generic", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "6.8.0-generic", False),
    ],
)
def test_memory_may_grow(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, system: str, is_configured: bool
) -> None:
    """torch's allocator is configured where drivers can do it, and the user hasn't."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: system)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(setting, "max_split_size_mb:512")
    on_torch._let_memory_grow()
    assert given == ["expandable_segments:True"] * is_configured
