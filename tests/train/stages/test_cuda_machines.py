"""Stages on CUDA, alone and beside others: the adapters of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from entrenar_py.compute import open_backend
from entrenar_py.shared.errors import BackendUnavailable
from tests.train.finetune import runs
from tests.train.service.cluster import Cluster
from tests.train.stages import mixed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def test_stages_on_cuda_have_the_bits_of_one_process(
    machines: Cluster, llama: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    stages = [("cuda", 1), ("cuda", 2), ("cuda", 1)]
    losses = mixed.by_stages(machines, small, llama, tmp_path, stages)
    assert losses == mixed.alone(small, llama, tmp_path, "cuda")
    assert runs.adapters(tmp_path / "out") == runs.adapters(tmp_path / "alone")


@pytest.mark.wgpu
@pytest.mark.parametrize(
    "stages",
    [
        [("cuda", 2), ("wgpu", 1), ("cpu", 1)],
        [("cpu", 1), ("cuda", 1), ("wgpu", 2)],
        [("wgpu", 1), ("cpu", 1), ("cuda", 2)],
    ],
)
def test_stages_on_three_backends_train_the_adapters_of_one_process(
    machines: Cluster,
    llama: Path,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: list[tuple[str, int]],
) -> None:
    try:
        open_backend("wgpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    losses = mixed.by_stages(machines, small, llama, tmp_path, stages)
    assert losses == pytest.approx(mixed.alone(small, llama, tmp_path, "cuda"), rel=mixed.LOSS)
    assert mixed.apart(tmp_path) <= mixed.APART
