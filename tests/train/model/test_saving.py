"""Merged models compute what the model with adapters does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py.train.model import model, stock
from entrenar_py.train.model.settings import Lora
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("is_tied", [True, False])
def test_adapters_of_a_head_are_not_added_to_the_embeddings(
    is_tied: bool, small: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = checkpoints.qwen3()
    config.tie_word_embeddings = is_tied
    whole = checkpoints.settings(small, tmp_path / "model", config)
    chosen = replace(whole, method="lora", lora=Lora(rank=2, targets=("q_proj", "lm_head")))
    module: Any = model.load(chosen, 0).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if "lora_B" in name:
                tensor.normal_()
        tokens = torch.tensor([[5, 6, 7, 8]])
        expected = module(input_ids=tokens).logits
        stock.merge(module, model.tokenizer(chosen), tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        apart = (merged(input_ids=tokens).logits - expected).norm()
    assert apart < 1e-5 * expected.norm()
