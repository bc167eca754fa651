"""Which models can be cut over ranks, and why others can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from entrenar_py.train.model import blocks

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
    plan = blocks.plan_of(model("Qwen3", head_dim=8))
    assert plan.styles["layers.1.self_attn.k_proj"] == "colwise"
    assert plan.styles["layers.0.mlp.down_proj"] == "rowwise"
    assert len(plan.styles) == 2 * 7
    assert plan.regions[:2] == ["layers.0.self_attn", "layers.0.mlp"]
    assert not plan.problem


def test_tables_of_tokens_stay_whole() -> None:
    """Some releases of transformers add a rule for tables that are tied to the head."""
    module: Any = model("Qwen3", head_dim=8)
    styles = blocks.plan_of(module).styles
    module.config.base_model_tp_plan = {
        **module.config.base_model_tp_plan,
        "embed_tokens": "embedding_rowwise",
    }
    assert blocks.plan_of(module).styles == styles


@pytest.mark.parametrize(
    ("kind", "changes", "size", "problem"),
    [
        ("Llama", {}, 2, ""),
        ("Llama", {}, 4, "num_key_value_heads=2 is no multiple of 4 ranks"),
        (
            *("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, 2),
            "num_attention_heads=1 is no multiple of 2 ranks",
        ),
        (
            *("Llama", {"intermediate_size": 49}, 2),
            "layers.0.mlp.gate_proj has 49 outputs, no multiple of 2 ranks",
        ),
        (
            *("Llama", {"attention_dropout": 0.1}, 2),
            "attention_dropout=0.1 in config.json draws random numbers that differ between ranks",
        ),
        (
            *("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 1}, 2),
            "GPT2Model has no plan for cutting its layers (base_model_tp_plan)",
        ),
        (
            *("Phi3", {}, 2),
            "Phi3Model would have layers.0.self_attn.o_proj cut by rowwise_split_input, a Linear",
        ),
    ],
)
def test_what_ranks_can_share(kind: str, changes: dict[str, Any], size: int, problem: str) -> None:
    assert blocks.problem_of_sharing(model(kind, **changes), size) == problem
