"""The stages of a model, one after another, have the gradients of the whole model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import ALL_LINEAR, Classes, Lora, StagePlan
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.stage_model import Received
from entrenar_py.train.stages.stage_step import Backward, Hidden, TorchStage
from tests.train.model import checkpoints

SCALE = 2.0**-6
CPU = torch.device("cpu")


def config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a model of `kind` with four blocks."""
    transformers: Any = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return getattr(transformers, f"{kind}Config")(**{**sizes, **changes})


def gpt2(**changes: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 512,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 128,
        "pad_token_id": 0,
    }
    return transformers.GPT2Config(**{**sizes, **changes})


def neox() -> Any:
    """Of attention and MLP beside each other, over rotary positions."""
    return config("GPTNeoX", use_parallel_residual=True)


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = ["linear_attention", "full_attention"] * 2
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Its configuration, and what is adapted.
MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "llama": (partial(config, "Llama"), ("q_proj", "down_proj")),
    "llama-untied": (partial(config, "Llama", tie_word_embeddings=False), ("v_proj",)),
    "qwen3": (partial(config, "Qwen3", head_dim=8), ("q_proj", "v_proj")),
    "qwen3, all linear": (partial(config, "Qwen3", head_dim=8), (ALL_LINEAR,)),
    "gemma2": (partial(config, "Gemma2", head_dim=8, sliding_window=8), ("q_proj", "o_proj")),
    "gemma3": (
        partial(config, "Gemma3Text", head_dim=8, sliding_window=8, sliding_window_pattern=2),
        ("q_proj", "o_proj"),
    ),
    "mistral": (partial(config, "Mistral", sliding_window=8), ("k_proj",)),
    "phi3": (partial(config, "Phi3"), ("qkv_proj",)),
    "qwen3-moe": (partial(config, "Qwen3Moe", head_dim=8, **ROUTED), ("q_proj",)),
    "olmo2": (partial(config, "Olmo2"), ("o_proj",)),
    "gpt2": (gpt2, ("c_attn", "c_proj")),
    "gpt-neox": (neox, ("query_key_value",)),
    "falcon": (
        partial(config, "Falcon", new_decoder_architecture=True, num_kv_heads=2),
        ("query_key_value",),
    ),
    "phi": (partial(config, "Phi"), ("q_proj", "fc1")),
    "starcoder2": (partial(config, "Starcoder2", embedding_dropout=0.1), ("q_proj",)),
    "bloom": (
        lambda: pytest.importorskip("transformers").BloomConfig(
            vocab_size=512, hidden_size=32, n_layer=4, n_head=4
        ),
        ("query_key_value",),
    ),
    "opt": (
        lambda: pytest.importorskip("transformers").OPTConfig(
            vocab_size=512,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
            dropout=0.5,
        ),
        ("q_proj", "fc1"),
    ),
    "stablelm": (partial(config, "StableLm"), ("q_proj",)),
    "cohere": (partial(config, "Cohere"), ("q_proj",)),
    "glm4": (partial(config, "Glm4", head_dim=8), ("q_proj",)),
    "qwen3.5": (
        partial(config, "Qwen3_5Text", head_dim=8, layer_types=MIXED, pad_token_id=0, **LINEAR),
        ("q_proj", "out_proj", "down_proj"),
    ),
    "llama4": (
        partial(config, "Llama4Text", head_dim=8, num_local_experts=2, pad_token_id=0),
        ("q_proj",),
    ),
    "smollm3": (partial(config, "SmolLM3", pad_token_id=0), ("q_proj",)),
}


def prepared_of(
    small: Path, folder: Path, made: Any, targets: tuple[str, ...], **changes: Any
) -> Prepared:
    """Return a run with a random checkpoint of the configuration `made`."""
    settings = checkpoints.settings(small, folder, made)
    lora = Lora(rank=2, targets=targets, dropout=0.2)
    settings = replace(settings, **{"method": "lora", "lora": lora, **changes})
    if settings.task == "classify":
        settings = replace(settings, classes=Classes(labels=("safe", "unsafe")))
    return preparation.prepare(settings, folder / "cache")


def stages_of(prepared: Prepared, *ends: int) -> list[TorchStage]:
    """Return the stages that end before the blocks `ends`, with the whole run's first values."""
    settings = prepared.settings
    starts = (0, *ends[:-1])
    plan = tuple(StagePlan(layers=pair) for pair in zip(starts, ends, strict=True))
    begin = model.without_weights if settings.adapts else model.load
    shell = begin(settings, prepared.pad_token)
    first = dict(shell.named_parameters())
    cut = cutting.of(replace(settings, stages=plan), shell)
    found = []
    for number in range(len(cut.stages)):
        workload = stage_model.load_stage(prepared, cut, number)
        tensors = {
            spec.name: first[spec.name].detach().clone().requires_grad_() for spec in workload.specs
        }
        found.append(TorchStage(workload, tensors, place=CPU, scale=SCALE))
    return found


def dropout(seed: int) -> Dropout:
    return Dropout(0.0, np.random.Generator(np.random.PCG64(seed)))


def passed(stages: list[TorchStage], ids: list[int]) -> tuple[float, list[Any]]:
    """Pass a shard through all stages and back; return its loss and all gradients."""
    came: Received | None = None
    done: list[Backward] = []
    for stage in stages:
        stage.begin()
        out = stage.forward(0, ids, came, dropout(3))
        if isinstance(out, Hidden):
            came = Received(out.tensor, out.draws)
        else:
            done.append(out)
    for stage in reversed(stages[:-1]):
        assert done[-1].hidden is not None
        done.append(stage.backward(0, done[-1].hidden))
    return done[0].loss, [one for backward in reversed(done) for one in backward.gradients]


def require_same_bits(prepared: Prepared, *ends: int) -> None:
    """Compare a shard's loss and gradients with those of the whole model."""
    whole = prepared.workload()
    tensors = {name: one for name, one in whole.module.named_parameters() if one.requires_grad}
    ids = [0, 1, 2]
    loss, gradients = whole.gradients(tensors, ids, drop=dropout(3), scale=SCALE)
    assert any(np.abs(one).max() > 0 for one in gradients)
    found_loss, found = passed(stages_of(prepared, *ends), ids)
    assert found_loss == loss
    assert len(found) == len(gradients)
    for spec, ours, theirs in zip(whole.specs, found, gradients, strict=True):
        assert np.array_equal(ours, theirs), spec.name


@pytest.mark.parametrize("kind", MODELS)
def test_three_stages(small: Path, tmp_path: Path, kind: str) -> None:
    make, targets = MODELS[kind]
    require_same_bits(prepared_of(small, tmp_path / "model", make(), targets), 1, 3, 4)


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    "changes", [{"precision": "bfloat16"}, {"task": "classify"}, {"recompute": "blocks"}]
)
def test_two_stages(small: Path, tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    make, targets = MODELS[kind]
    require_same_bits(prepared_of(small, tmp_path / "model", make(), targets, **changes), 2, 4)


@pytest.mark.parametrize("kind", ["llama-untied", "gpt-neox", "mistral"])
def test_all_weights(small: Path, tmp_path: Path, kind: str) -> None:
    make, targets = MODELS[kind]
    prepared = prepared_of(small, tmp_path / "model", make(), targets, method="full")
    require_same_bits(prepared, 1, 3, 4)


def test_a_table_that_two_stages_would_train(small: Path, tmp_path: Path) -> None:
    make, targets = MODELS["qwen3"]
    made = make()
    made.tie_word_embeddings = True
    prepared = prepared_of(small, tmp_path / "model", made, targets, method="full")
    with pytest.raises(UsageError, match=r"its head, too \(tie_word_embeddings\)"):
        stages_of(prepared, 2, 4)


def test_a_stage_without_anything_to_train(small: Path, tmp_path: Path) -> None:
    make, _ = MODELS["llama"]
    target = "layers.0.self_attn.q_proj"
    prepared = prepared_of(small, tmp_path / "model", make(), (target,))
    with pytest.raises(UsageError, match="stage 1 has nothing to train in blocks 2 to 3"):
        stages_of(prepared, 2, 4)


def test_a_model_that_draws_by_torchs_generator_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that leaves out blocks at random."""
    llama: Any = pytest.importorskip("transformers").models.llama.modeling_llama
    forward = llama.LlamaDecoderLayer.forward

    def drawing(self: Any, *given: Any, **named: Any) -> Any:
        return forward(self, *given, **named) * (torch.rand(()) < 2)

    prepared = prepared_of(small, tmp_path / "model", config("Llama"), ("q_proj",))
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", drawing)
    with pytest.raises(UsageError, match="LlamaModel draws random numbers"):
        stages_of(prepared, 1, 4)


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_that_looks_ahead_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The stage that does so sees it by itself, as a process with the whole model does."""
    llama: Any = pytest.importorskip("transformers").models.llama.modeling_llama
    forward = llama.LlamaDecoderLayer.forward

    def looking(self: Any, hidden: torch.Tensor, *given: Any, **named: Any) -> Any:
        found = forward(self, hidden, *given, **named)
        return found + hidden.flip(1) if self.self_attn.layer_idx == 2 * number else found

    prepared = prepared_of(small, tmp_path / "model", config("Llama"), ("q_proj",))
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", looking)
    with pytest.raises(UsageError, match="it sees the tokens that it should predict"):
        prepared.workload()
    with pytest.raises(UsageError, match="it sees the tokens that it should predict"):
        stages_of(prepared, 2, 4)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (
            "Gemma4Text",
            {"num_kv_shared_layers": 2},
            "blocks 2 to 3 of .* can.t run on hidden states alone",
        ),
        (
            "Gemma3nText",
            {
                "num_kv_shared_layers": 0,
                "altup_num_inputs": 2,
                "laurel_rank": 4,
                "activation_sparsity_pattern": [0.0] * 4,
            },
            "hidden states between blocks have 4 dims",
        ),
    ],
)
def test_blocks_that_pass_on_more_are_refused(
    small: Path, tmp_path: Path, kind: str, changes: dict[str, Any], problem: str
) -> None:
    """Keys and values of an earlier block, and several hidden states for a token."""
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = {"head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
    made = config(kind, layer_types=layers, pad_token_id=0, **sizes, **changes)
    prepared = prepared_of(small, tmp_path / "model", made, ("q_proj", "o_proj"))
    with pytest.raises(UsageError, match=problem):
        stages_of(prepared, 2, 4)


def test_blocks_that_read_the_embeddings_are_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later stage has no table of tokens."""
    llama: Any = pytest.importorskip("transformers").models.llama.modeling_llama
    forward = llama.LlamaDecoderLayer.forward
    embedded: list[torch.Tensor] = []

    def reading(self: Any, hidden: torch.Tensor, *given: Any, **named: Any) -> Any:
        return forward(self, hidden, *given, **named) + embedded[-1]

    class Noting(llama.LlamaRotaryEmbedding):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, *given: Any, **named: Any) -> Any:
            embedded.append(x)
            return super().forward(x, *given, **named)

    prepared = prepared_of(small, tmp_path / "model", config("Llama"), ("q_proj",))
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", reading)
    monkeypatch.setattr(llama, "LlamaRotaryEmbedding", Noting)
    with pytest.raises(UsageError, match="LlamaModel read the embeddings of tokens"):
        stages_of(prepared, 1, 4)


def test_a_norm_that_is_registered_before_the_blocks_it_follows(
    small: Path, tmp_path: Path
) -> None:
    """The first stage would train it, and the last one uses it."""
    make, targets = MODELS["opt"]
    made = make()
    made.tie_word_embeddings = False
    prepared = prepared_of(small, tmp_path / "model", made, targets, method="full")
    with pytest.raises(UsageError, match=r"registers \S*final_layer_norm.weight on the wrong side"):
        stages_of(prepared, 2, 4)
