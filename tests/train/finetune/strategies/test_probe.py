"""A model that is cut wrongly is refused, and one that only rounds otherwise is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.finetune.strategies import strategy
from entrenar_py.train.model import precision, preparation
from entrenar_py.train.model.workload import Finetuning
from tests.train.finetune.strategies.runs import Case

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def workload(
    request: pytest.FixtureRequest, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Finetuning:
    """The small Qwen3 with adapters, in one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    case = Case(
        folder=tmp_path, model=small / "model", small=small, more={"precision": request.param}
    )
    return preparation.prepare(settings_file.load(case.write("out", None))).workload()


def require_same(before: strategy.Reference, workload: Finetuning) -> None:
    strategy.require_same_logits(
        before, strategy.probe_logits(workload, CPU), "tensor_parallel", "Qwen3"
    )


def test_another_rounding_is_the_same_model(
    workload: Finetuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and products in float32, in place of bfloat16."""
    before = strategy.reference_of(workload, CPU)
    assert 0 < before.rounding < 0.05
    workload.module.float()
    monkeypatch.setattr(workload, "formats", lambda device: precision.as_given(device))
    require_same(before, workload)


@pytest.mark.parametrize("layer", ["o_proj", "down_proj", "q_proj", "v_proj"])
def test_a_part_that_is_missing_is_told(workload: Finetuning, layer: str) -> None:
    """Of each layer's weights, the half of another rank is 0, as if sums were never added."""
    before = strategy.reference_of(workload, CPU)
    for name, parameter in workload.module.named_parameters():
        if f"{layer}.base_layer.weight" in name:
            dim = 1 if layer in ("o_proj", "down_proj") else 0
            parameter.data.chunk(2, dim)[1].zero_()
    with pytest.raises(UsageError, match=r"strategy=tensor_parallel: Qwen3 computes something"):
        require_same(before, workload)


def test_adapters_are_part_of_it(workload: Finetuning) -> None:
    """With B filled, an adapter that is applied twice is told, and B is empty afterwards."""
    with strategy.filled(workload.module):
        before = strategy.reference_of(workload, CPU)
        for name, parameter in workload.module.named_parameters():
            if "lora_A" in name:
                parameter.data.mul_(2)
        with pytest.raises(UsageError, match="computes something else"):
            require_same(before, workload)
    assert not any(p.any() for n, p in workload.module.named_parameters() if "lora_B" in n)


def test_what_is_no_number_is_left_alone() -> None:
    """A router of experts returns a tuple, with the experts that it chose."""

    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return scores, scores.argmax(-1)

    module, x = nn.Sequential(Router(3, 4)), torch.ones(2, 3)
    exact, chosen = module(x)
    with strategy._rounded(module, torch.Generator().manual_seed(0)):
        other, same = module(x)
    assert torch.equal(chosen, same)
    assert 0 < float((exact - other).detach().abs().max()) < 1e-5
    assert not module[0]._forward_hooks
