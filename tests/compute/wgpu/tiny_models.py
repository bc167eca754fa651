"""Small models of transformers, with random weights, and what a step of each is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from entrenar_py.compute.wgpu.capture import Function

VOCABULARY, TOKENS, PIXELS, CLASSES = 97, 8, 16, 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_SIZES, **_SPECIAL, "num_key_value_heads": 1}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Tiny:
    """A model: its class and configuration in transformers.

    It `reads` tokens, pixels, or classes of tokens. With `is_fixed` its layers have the modes of
    inference: a batch norm would write its statistics in training.
    """

    config: str
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    reads: str = "tokens"
    is_fixed: bool = False


MODELS = {
    "gpt2": Tiny(
        *("GPT2Config", "GPT2LMHeadModel"),
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": Tiny("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "qwen2": Tiny("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": Tiny("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 8}),
    "gemma2": Tiny(
        "Gemma2Config", "Gemma2ForCausalLM", _GROUPED | {"head_dim": 8, "sliding_window": 4}
    ),
    "gpt_neox": Tiny("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES | _SPECIAL),
    "mistral": Tiny("MistralConfig", "MistralForCausalLM", _GROUPED | {"sliding_window": 4}),
    "t5": Tiny(
        *("T5Config", "T5ForConditionalGeneration"),
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
        | {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "bert": Tiny("BertConfig", "BertForMaskedLM", _SIZES | _NO_DROPOUT),
    "phi3": Tiny("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "qwen3_classes": Tiny(
        *("Qwen3Config", "Qwen3ForSequenceClassification"),
        _GROUPED | {"head_dim": 8, "num_labels": CLASSES},
        reads="classes",
    ),
    "opt": Tiny(
        *("OPTConfig", "OPTForCausalLM"),
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 24}
        | {"num_attention_heads": 2, "max_position_embeddings": 16, "word_embed_proj_dim": 16}
        | {"dropout": 0.0},
        is_fixed=True,  # else transformers 5.17 draws which layers to drop, of which it has none
    ),
    "mixtral": Tiny(
        *("MixtralConfig", "MixtralForCausalLM"),
        _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "vit": Tiny(
        *("ViTConfig", "ViTForImageClassification"),
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"intermediate_size": 24, "image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES},
        reads="pixels",
    ),
    "mamba": Tiny(
        *("MambaConfig", "MambaForCausalLM"),
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    ),
    "resnet": Tiny(
        *("ResNetConfig", "ResNetForImageClassification"),
        {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic"}
        | {"num_labels": CLASSES},
        reads="pixels",
        is_fixed=True,
    ),
}


def build(name: str) -> nn.Module:
    """Return the model `name` with random weights."""
    transformers = pytest.importorskip("transformers")
    tiny = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, tiny.config)(**tiny.sizes)
    model: nn.Module = getattr(transformers, tiny.model)(config)
    return model.eval() if tiny.is_fixed else model.train()


def inputs(name: str) -> dict[str, Tensor]:
    """Return two samples, one of them filled up: tokens and mask, or pixels; and labels."""
    reads = MODELS[name].reads
    generator = torch.Generator().manual_seed(1)
    classes = torch.tensor([0, 2])
    if reads == "pixels":
        pixels = torch.randn(2, 3, PIXELS, PIXELS, generator=generator)
        return {"pixel_values": pixels, "labels": classes}
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 5:] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    labels = classes if reads == "classes" else tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def step(model: nn.Module, given: dict[str, Tensor]) -> tuple[Function, list[Tensor]]:
    """Return the step (loss, gradients of all used weights) as a function of tensors, and these."""
    held = {name: one.detach() for name, one in model.named_parameters()}
    options = {"use_cache": False} if "input_ids" in given else {}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in tensors[len(given) :]]
        weights = dict(zip(held, leaves, strict=True))
        batch = dict(zip(given, tensors, strict=False))
        loss = torch.func.functional_call(model, weights, (), {**batch, **options}).loss
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return loss.detach(), *(one for one in found if one is not None)

    return run, [*given.values(), *held.values()]
