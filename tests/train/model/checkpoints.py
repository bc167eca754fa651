"""Checkpoints of small models with random weights, of several families."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py.train.model.settings import Data, Settings

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def settings(small: Path, folder: Path, config: Any) -> Settings:
    """Write a model with `config` to `folder`; return settings that train all of it on texts."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / name, folder / name)
    data = Data(train=small / "test.jsonl", max_tokens=64)
    return Settings(model=folder, task="text", method="full", output=folder / "out", data=data)


def _config(kind: str, **changes: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    return getattr(transformers, f"{kind}Config")(**{**_SIZES, **changes})


def qwen3() -> Any:
    return _config("Qwen3", head_dim=8)


def llama() -> Any:
    return _config("Llama")


def gemma2() -> Any:
    """Of alternating windows, shorter than the rows, and with capped logits."""
    return _config("Gemma2", head_dim=8, sliding_window=8)


def mistral() -> Any:
    """Of a window that is shorter than the rows."""
    return _config("Mistral", sliding_window=8)


def qwen3_moe() -> Any:
    """Of experts that peft adapts as tensors, and a router that it adapts as one."""
    return _config(
        "Qwen3Moe", head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )


def llama4() -> Any:
    """Of a router that is a linear layer and returns two tensors."""
    return _config("Llama4Text", head_dim=8, intermediate_size_mlp=48, num_local_experts=4)


def phimoe() -> Any:
    """Of a router that is a linear layer and returns three tensors."""
    return _config("Phimoe", num_local_experts=4)


def codegen() -> Any:
    """Of a configuration without a padding token, as is RWKV's."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    return transformers.CodeGenConfig(**sizes)


def gpt2() -> Any:
    """Of learned positions."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
    return transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def opt() -> Any:
    """Drops without any nn.Dropout."""
    transformers: Any = pytest.importorskip("transformers")
    return transformers.OPTConfig(
        vocab_size=512,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.5,
    )
