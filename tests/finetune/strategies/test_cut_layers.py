"""Which models can be cut over ranks, and why others can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from entrenar_py.errors import UsageError
from entrenar_py.finetune.strategies import cut_layers

transformers: Any = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def model(kind: str, **changes: Any) -> nn.Module:
    """Return a model of random weights."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        found: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return found


def test_the_plan_names_every_layer_of_every_block() -> None:
    plan = cut_layers.plan_of(model("Qwen3", head_dim=8), "tensor_parallel")
    assert plan.styles["layers.1.self_attn.k_proj"] == "colwise"
    assert plan.styles["layers.0.mlp.down_proj"] == "rowwise"
    assert len(plan.styles) == 2 * 7
    assert plan.regions[:2] == ["layers.0.self_attn", "layers.0.mlp"]


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UsageError, match=r"GPT2Model says nothing .*base_model_tp_plan.*use ddp"):
        cut_layers.plan_of(model("GPT2", n_embd=32, n_head=4, n_layer=1), "tensor_parallel")


def test_layers_that_are_cut_in_another_way_are_refused() -> None:
    with pytest.raises(UsageError, match=r"self_attn.o_proj cut by rowwise_split_input"):
        cut_layers.plan_of(model("Phi3"), "sequence_parallel")


@pytest.mark.parametrize(
    ("changes", "world_size", "problem"),
    [
        ({}, 4, "num_key_value_heads=2; use a number of ranks that divides it"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, 2, "num_attention_heads=1; use"),
        ({"intermediate_size": 49}, 2, "layers.0.mlp.gate_proj has 49 outputs"),
    ],
)
def test_layers_that_ranks_can_not_share_are_refused(
    changes: dict[str, int], world_size: int, problem: str
) -> None:
    plan = cut_layers.plan_of(model("Llama", **changes), "tensor_parallel")
    with pytest.raises(UsageError, match=problem):
        cut_layers.require_even(plan, "tensor_parallel", world_size)


def test_a_model_that_drops_is_refused() -> None:
    cut_layers.require_no_dropout(model("Llama"), "tensor_parallel")
    with pytest.raises(UsageError, match=r"attention_dropout=0.1 in config.json"):
        cut_layers.require_no_dropout(model("Llama", attention_dropout=0.1), "tensor_parallel")
