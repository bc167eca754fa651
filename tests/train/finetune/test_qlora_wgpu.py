"""NF4 and 16-bit weights on a wgpu device: memory, gradients within their bounds, whole runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from entrenar_py import entrenar as cli
from entrenar_py.compute.wgpu import WgpuBackend, open_wgpu
from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.compute.wgpu.bounds.sensitivity import Deviation
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.train.arithmetic.engine import Engine, no_dropout
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.settings import Data, Lora, Settings
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.finetune import runs

extras.require("bitsandbytes")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.wgpu,
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
IDS = [0, 1, 2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WgpuBackend:
    """The wgpu backend; skips without an adapter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        return open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def step_of(
    small: Path, folder: Path, backend: WgpuBackend, **changes: Any
) -> tuple[list[Deviation], int]:
    """Compute a shard of a small Qwen3 on the device.

    Return how far its results are from float64, and the bytes of the frozen weights there.
    """
    settings = Settings(
        model=folder / "model",
        task="text",
        output=folder / "out",
        data=Data(train=small / "test.jsonl", max_tokens=64),
        lora=Lora(rank=4, alpha=8, targets=("q_proj", "v_proj")),
        **changes,
    )
    workload = preparation.prepare(settings).workload()
    initial = workload.initial(np.random.default_rng(0))
    for name, array in initial.items():
        if "lora_B" in name:  # zeros at first, which would hide most of the gradient
            array[:] = np.random.default_rng(1).normal(0, 0.1, array.shape)
    engine = Engine(workload, backend, initial, scale=1.0)
    vector, loss, _ = engine.shard(IDS, accumulation=1, drop=no_dropout)
    step: Any = engine.stepper
    graph, inputs = step.captured(workload.batch(IDS), [])
    sizes = [tensor.numel() for tensor in engine.tensors.values()]
    parts = torch.split(torch.from_numpy(vector), sizes)
    tensors = engine.tensors.values()
    shaped = [one.reshape(tensor.shape) for one, tensor in zip(parts, tensors, strict=True)]
    compiled = backend.programs.of(workload)
    assert compiled.constants is not None
    found = sensitivity.deviations([torch.tensor(loss), *shaped], graph, inputs)
    return found, sum(one.memory.size for one in compiled.constants)


def checkpoint(small: Path, folder: Path) -> None:
    """Write a Qwen3 of random weights whose blocks hold most of them."""
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / name, folder / "model" / name)


def test_frozen_weights_stay_packed_and_gradients_within_their_bounds(
    small: Path, tmp_path: Path, backend: WgpuBackend
) -> None:
    checkpoint(small, tmp_path)
    memory = {}
    for method, precision in (("lora", "bfloat16"), ("qlora", "bfloat16")):
        found, memory[method] = step_of(
            small, tmp_path, backend, method=method, precision=precision
        )
        assert all(one.explained for one in found), method
        assert all(one.size > 0 for one in found), "gradients that are compared are not zero"
    settings = Settings(
        model=tmp_path / "model", task="text", output=tmp_path, data=Data(train=small)
    )
    module = model.load(settings, 0)
    in_float32 = 4 * sum(one.numel() for one in module.parameters() if not one.requires_grad)
    assert memory["lora"] <= in_float32 / 2
    assert memory["qlora"] <= in_float32 / 4


@pytest.mark.by_hand
def test_a_run_trains_the_adapters_that_the_cpu_trains(
    small: Path, tmp_path: Path, backend: WgpuBackend
) -> None:
    outputs, losses = [], []
    for name in ("cpu", "wgpu"):
        config = runs.configured(
            tmp_path,
            small,
            method="qlora",
            output=f"out-{name}",
            data={"max_tokens": 16, "on_error": "skip", "validation_share": 0},
            lora={"dropout": 0},
        )
        assert cli.main(["finetune", str(config), "--backend", name]) == exit_codes.DONE
        outputs.append(load_file(tmp_path / f"out-{name}" / "adapter_model.safetensors"))
        losses.append([one["loss"] for one in runs.told(tmp_path / f"out-{name}", "step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    start = model.load(settings_file.load(config), 0).state_dict()
    moved = apart = 0.0
    for name, one in outputs[0].items():
        before = start[_inside(name)].numpy()
        moved += float(np.square(one - before).sum())
        apart += float(np.square(one - outputs[1][name]).sum())
    assert apart <= 1e-3**2 * moved


def _inside(name: str) -> str:
    """Return a saved tensor's name in the model."""
    named = name.replace(".lora_A.weight", ".lora_A.default.weight")
    named = named.replace(".lora_B.weight", ".lora_B.default.weight")
    return named.replace("score.weight", "score.modules_to_save.default.weight")
