"""The config.json of Qwen3-4B, written by hand, and settings for it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from entrenar_py.train.model.settings import Data, Lora, Settings, Training

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
TINY: dict[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


def settings(folder: Path, config: dict[str, Any], **changes: Any) -> Settings:
    """Return settings for a checkpoint without weights: its folder has a config.json alone."""
    text = json.dumps(config)
    model = folder / hashlib.sha256(text.encode()).hexdigest()  # a folder may hold several models
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(text, encoding="utf-8")
    given: dict[str, Any] = {
        "task": "instruct",
        "data": Data(train=folder / "rows.jsonl"),
        "training": Training(batch_size=16, num_shards=4),
        "lora": Lora(targets=("q_proj", "v_proj")),
    }
    return Settings(model=model, output=folder / "out", **(given | changes))
