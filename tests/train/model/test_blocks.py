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


def test_a_decoder_that_the_prefix_does_not_name() -> None:
    """The head of Llama 4's text model names its decoder otherwise than it keeps it."""
    module: Any = model("Llama4Text", head_dim=8, intermediate_size_mlp=48, num_local_experts=2)
    assert blocks.decoder_of(module) is module.model


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


def number_probed(module: nn.Module) -> int:
    """Return how many blocks a probe of `module` sees."""
    name, layers = blocks.place_of(module)
    number = blocks.probed(module, lambda: len(list(module.get_submodule(name).children())))
    assert blocks.of(module) is layers
    return number


def test_a_probe_sees_one_block_of_each_kind() -> None:
    """Blocks that follow the last new kind are put aside, so that indices stay the same."""
    assert number_probed(model("Qwen3", head_dim=8, num_hidden_layers=6)) == 1
    turns = ["sliding_attention", "sliding_attention", "full_attention"]
    mixed = {"head_dim": 8, "num_hidden_layers": 6, "layer_types": 2 * turns}
    assert number_probed(model("Gemma2", **mixed)) == 3


@pytest.mark.parametrize("change", ["dropout", "shape", "class", "setting"])
def test_a_probe_sees_a_block_that_differs(change: str) -> None:
    module = model("Qwen3", head_dim=8, num_hidden_layers=6)
    block: Any = blocks.of(module)[3]
    if change == "dropout":
        block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, nn.Dropout(0.1))
    elif change == "shape":
        block.mlp.up_proj = nn.Linear(32, 40, bias=False)
    elif change == "class":
        block.mlp = nn.Identity()
    else:
        block.self_attn.is_causal = False
    assert number_probed(module) == 4


def test_a_probe_sees_all_blocks_of_other_code() -> None:
    module = model("Qwen3", head_dim=8, num_hidden_layers=6)
    for block in blocks.of(module):
        block.__class__ = type("Block", (type(block),), {})
    assert number_probed(module) == 6


def test_a_probe_sees_all_blocks_if_the_model_needs_them() -> None:
    module = model("Qwen3", head_dim=8, num_hidden_layers=6)
    assert blocks.probed(module, lambda: blocks.of(module)[5] is not None)
    assert blocks.probed(nn.Linear(2, 2), lambda: True)


def test_a_probe_that_fails_puts_all_blocks_back() -> None:
    module = model("Qwen3", head_dim=8, num_hidden_layers=6)

    def fails() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        blocks.probed(module, fails)
    assert len(blocks.of(module)) == 6
