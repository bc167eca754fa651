"""Runs whose workers compute on several backends, and what they keep on a device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py import entrenar as cli
from entrenar_py.compute import open_backend
from entrenar_py.compute.wgpu import WgpuBackend, open_wgpu
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.engine import Engine
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import preparation
from entrenar_py.train.service import exit_codes

CONFIG = """\
model: {small}/model
task: classify
output: out
workers: {workers}
data: {{train: rows.jsonl, max_tokens: 16}}
classes: {{labels: [safe, unsafe]}}
lora: {{rank: 2, alpha: 4, targets: [v_proj], dropout: 0.2}}
training: {{batch_size: 8, num_shards: 4, learning_rate: 1e-3, epochs: 6}}
"""
NUM_STEPS = 12

pytestmark = [
    pytest.mark.wgpu,
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(autouse=True)
def wgpu_backend() -> WgpuBackend:
    """The wgpu backend; skips without an adapter."""
    try:
        return open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def config(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a configuration with 16 rows of 9 to 16 tokens, so that few shapes are compiled."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(small / "model")
    lines = (small / "train.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [one for one in lines if 8 < len(tokenizer(json.loads(one)["text"]).input_ids) <= 16]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:16]) + "\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(small=small, workers=1), encoding="utf-8")
    return path


def test_workers_of_two_backends(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on cpu and wgpu ends with one digest."""
    assert cli.main(["finetune", str(config), "--backend", "cpu,wgpu"]) == exit_codes.DONE
    told = capsys.readouterr().out
    assert "worker 0: cpu" in told
    assert "worker 1: wgpu" in told

    ledger = config.parent / "out" / "ledger.jsonl"
    assert cli.main(["ledger", "verify", str(ledger)]) == exit_codes.DONE
    assert f"steps 0 to {NUM_STEPS - 1} of" in capsys.readouterr().out
    events = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    computed = {one["backend"] for one in found(events, "served")}
    assert computed == {"cpu", "wgpu"}


def found(tree: Any, key: str) -> list[dict[str, Any]]:
    """Return the mappings within `tree` that have `key`."""
    if isinstance(tree, list):
        return [one for each in tree for one in found(each, key)]
    if not isinstance(tree, dict):
        return []
    inner = [one for each in tree.values() for one in found(each, key)]
    return [*inner, tree] if key in tree else inner


def test_one_copy_of_frozen_weights(
    config: Path, wgpu_backend: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of two shard sizes read one copy of the frozen weights; gradients are the CPU's."""
    workload = preparation.prepare(settings_file.load(config)).workload()
    rng = np.random.default_rng(0)
    values = {
        name: (value + rng.normal(0, 0.05, value.shape)).astype(np.float32)
        for name, value in workload.initial(rng).items()
    }
    uploaded: list[int] = []
    kind = type(wgpu_backend.programs.device.handle)
    create = kind.create_buffer_with_data

    def count(self: Any, *, data: Any, **keywords: Any) -> object:
        uploaded.append(memoryview(data).nbytes)
        return create(self, data=data, **keywords)

    monkeypatch.setattr(kind, "create_buffer_with_data", count)
    ours = Engine(workload, wgpu_backend, values, scale=1.0)
    cpu = Engine(workload, open_backend("cpu"), values, scale=1.0)
    for ids in ([2, 3, 4], [0, 1]):
        drops = [engine.Dropout(0.0, np.random.default_rng(3)) for _ in range(2)]
        vector, loss, weight = ours.shard(ids, accumulation=1, drop=drops[0])
        right, loss_there, weight_there = cpu.shard(ids, accumulation=1, drop=drops[1])
        assert drops[0].digest() == drops[1].digest() is not None
        assert weight == weight_there
        assert loss == pytest.approx(loss_there, rel=1e-6)
        assert np.abs(vector - right).max() <= 1e-6 * np.abs(right).max()
    frozen = sum(4 * one.numel() for one in workload.constants.values())
    compiled = wgpu_backend.programs.of(workload)
    programs = compiled.programs
    assert len(programs) == 2
    assert compiled.constants is not None
    assert sum(4 * math.prod(one.shape) for one in compiled.constants) == frozen
    assert frozen <= sum(uploaded) < 1.5 * frozen
    assert compiled.scratch.num_bytes == max(one.memory_bytes for one in programs.values())


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("xpu", "backend='xpu': allowed are cuda, wgpu, cpu, cuda:N, wgpu:N"),
        ("cpu,", "backend='': allowed are cuda, wgpu, cpu, cuda:N, wgpu:N"),
        ("cpu,wgpu:99", "backend wgpu:99: this machine has wgpu:0"),
        ("cpu,wgpu,cpu,cpu,cpu", "training.num_shards=4, so a worker would have no shard"),
    ],
)
def test_what_cannot_compute(
    config: Path, capsys: pytest.CaptureFixture[str], names: str, told: str
) -> None:
    """Unknown, missing and superfluous backends are refused before anything runs."""
    assert cli.main(["finetune", str(config), "--backend", names]) != exit_codes.DONE
    assert told in capsys.readouterr().err
    assert not (config.parent / "out" / "ledger.jsonl").exists()
