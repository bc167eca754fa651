"""A worker's blocks are compiled before its first step, for what that step needs.

Dynamo traces on the CPU here, without kernels of its own; `test_cuda.py` compares bits on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn

from entrenar_py.compute import on_torch
from entrenar_py.train.arithmetic.engine import no_dropout
from entrenar_py.train.model import preparation, workload
from tests.train.model import checkpoints


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_first_step_compiles_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    monkeypatch.setattr(workload, "COMPILED", ("cpu",))
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    settings = checkpoints.settings(small, tmp_path / "model", checkpoints.qwen3())
    settings = replace(settings, method="lora", compile=True)
    work = preparation.prepare(settings, tmp_path / "cache").workload()
    work.warm_up(torch.device("cpu"), num_samples)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    assert before > 0
    trained = {name: one for name, one in work.module.named_parameters() if one.requires_grad}
    step = on_torch.DeviceStep(torch.device("cpu"), work, trained, scale=1.0)
    step.computed(work.batch(range(num_samples)), no_dropout)
    assert counts["unique_graphs"] == before
