"""Blocks that are computed again have the same gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.compute import open_backend
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import model, prepared, recompute
from entrenar_py.train.model.settings import Lora
from entrenar_py.train.model.workload import Finetuning
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [0, 1, 2, 3]


def gradient(workload: Finetuning) -> tuple[float, list[Any]]:
    """Return loss and gradient of a few samples."""
    drop = engine.Dropout(0.0, np.random.default_rng(1))
    tensors = {  # not those of the module: a block has to be computed again with the same ones
        name: torch.from_numpy(array + np.float32(0.01)).requires_grad_()
        for name, array in workload.initial(np.random.default_rng(0)).items()
    }
    return workload.gradients(tensors, IDS, drop=drop, scale=1.0)


@pytest.mark.parametrize("kind", [checkpoints.qwen3, checkpoints.llama, checkpoints.opt])
def test_gradients_have_the_same_bits(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = replace(
        checkpoints.settings(small, tmp_path / "model", kind()),
        method="lora",
        lora=Lora(rank=2, dropout=0.3),
    )
    found = {}
    for choice in ("none", "blocks"):
        workload = prepared.prepare(replace(settings, recompute=choice)).workload()
        found[choice] = gradient(workload)
    loss, gradients = found["none"]
    again, same = found["blocks"]
    assert again == loss
    assert all(np.array_equal(one, two) for one, two in zip(gradients, same, strict=True))
    assert any(np.abs(one).max() > 0 for one in gradients)


def test_a_block_is_computed_twice(small: Path, tmp_path: Path) -> None:
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.llama())
    module: Any = model.load(replace(settings, recompute="blocks"), pad_token=0)
    calls = []
    block = module.model.layers[0]
    block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = torch.tensor([[1, 2, 3]])
    module(input_ids=tokens).logits.sum().backward()
    assert len(calls) == 2
    module.eval()
    module(input_ids=tokens)
    assert len(calls) == 3


def test_a_model_without_blocks_is_refused() -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.config = type("Config", (), {"get_text_config": lambda self: self})()
    with pytest.raises(UsageError, match="Linear has no list of None blocks"):
        recompute.install(module)


@pytest.mark.wgpu
def test_blocks_are_computed_again_on_wgpu(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        backend = open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.llama())
    settings = replace(settings, method="lora", lora=Lora(rank=2))
    vectors = []
    for choice in ("none", "blocks"):
        workload = prepared.prepare(replace(settings, recompute=choice)).workload()
        start = workload.initial(np.random.default_rng(0))
        replica = engine.Engine(workload, backend, start, scale=1.0)
        vectors.append(replica.shard(IDS, accumulation=1, drop=engine.no_dropout)[0])
    none, blocks = vectors
    assert np.array_equal(none, blocks)
