"""Checkpoints of several families, and those that can't be trained."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings
from entrenar_py.train.model.workload import Finetuning

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = [0, 1, 2, 3]


def settings(small: Path, folder: Path, config: Any, *, task: str = "text") -> Settings:
    """Return settings for a model of random weights with `config`, and rows of the example."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / name, folder / name)
    labels = ("safe", "unsafe") if task == "classify" else ()
    return Settings(
        model=folder,
        task=task,
        method="full",
        output=folder / "out",
        data=Data(train=small / "test.jsonl", max_tokens=64),
        classes=Classes(labels=labels),
    )


def opt() -> Any:
    """Return a configuration that drops without any nn.Dropout."""
    transformers = pytest.importorskip("transformers")
    return transformers.OPTConfig(
        vocab_size=512,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.5,
    )


def bert(*, is_decoder: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        is_decoder=is_decoder,
    )


def gradient(workload: Finetuning, seed: int) -> tuple[float, list[Any]]:
    """Return loss and gradient of a few samples, with the random numbers of `seed`."""
    drop = engine.Dropout(0.0, np.random.default_rng(seed))
    tensors = {
        name: torch.from_numpy(array).requires_grad_()
        for name, array in workload.initial(np.random.default_rng(0)).items()
    }
    return workload.gradients(tensors, IDS, drop=drop, scale=1.0)


def test_what_a_model_drops_follows_from_its_shards_stream(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workload = preparation.prepare(settings(small, tmp_path, opt())).workload()
    loss, gradients = gradient(workload, 1)
    torch.rand(7)  # what this process drew before plays no part
    again, same = gradient(workload, 1)
    other, _ = gradient(workload, 2)
    assert loss == again != other
    assert all(np.array_equal(one, two) for one, two in zip(gradients, same, strict=True))


def test_a_model_that_sees_what_it_predicts_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it sees the tokens that it should predict"):
        model.load(settings(small, tmp_path, bert(is_decoder=False)), pad_token=0)
    causal = settings(small, tmp_path / "causal", bert(is_decoder=True))
    model.load(causal, pad_token=0)


def test_a_target_that_no_layer_has(small: Path, tmp_path: Path) -> None:
    chosen = replace(settings(small, tmp_path, opt()), method="lora", lora=Lora(targets=("query",)))
    with pytest.raises(UsageError, match=r"no layer of that name .*; it has k_proj, v_proj"):
        model.load(chosen, pad_token=0)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config.json", "no config.json there"),
        ("model.safetensors", "only safetensors are read"),
    ],
)
def test_a_checkpoint_that_lacks_a_file(
    small: Path, tmp_path: Path, name: str, problem: str
) -> None:
    chosen = settings(small, tmp_path, opt())
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=problem):
        model.load(chosen, pad_token=0)


def test_an_encoder_that_lacks_its_pooler_is_a_classifier(small: Path, tmp_path: Path) -> None:
    """Checkpoints of masked language models have none; adapters are saved with the trained one."""
    whole = settings(small, tmp_path, bert(is_decoder=True), task="classify")
    chosen = replace(whole, method="lora", lora=Lora(rank=2, targets=("query", "value")))
    module = model.load(chosen, 0)
    trained = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    assert any("pooler.modules_to_save" in name for name in trained)
    assert any("classifier.modules_to_save" in name for name in trained)
    with pytest.raises(
        UsageError, match=r"lora\.targets='pooler': the checkpoint lacks that layer"
    ):
        model.load(replace(chosen, lora=Lora(targets=("pooler",))), 0)


def test_a_layer_that_peft_can_not_adapt(small: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GraniteMoeConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    whole = settings(small, tmp_path, config)
    chosen = replace(whole, method="lora", lora=Lora(rank=2, targets=("q_proj", "router")))
    with pytest.raises(UsageError, match=r"lora.targets=q_proj, router: peft can't adapt all of t"):
        model.load(chosen, 0)


def gemma3() -> Any:
    """Return the configuration of a model that takes images, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.Gemma3Config(
        text_config={
            **sizes,
            "vocab_size": 512,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
    )


@pytest.mark.parametrize("task", ["text", "classify"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_no_text_passes_through_stays_as_it_is(
    method: str, task: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part for images has no gradient, although it has layers of the targets' names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = settings(small, tmp_path, gemma3(), task=task)
    chosen = replace(whole, method=method, lora=Lora(rank=2, targets=("q_proj",)))
    workload = preparation.prepare(chosen).workload()
    assert not any("vision" in spec.name or "multi_modal" in spec.name for spec in workload.specs)
    _, gradients = gradient(workload, 1)
    assert len(gradients) == len(workload.specs) > 1
    shaped = [name for name, held in model.shape(chosen).named_parameters() if held.requires_grad]
    assert sorted(shaped) == sorted(spec.name for spec in workload.specs)
    if method == "lora":
        only = replace(chosen, lora=Lora(rank=2, targets=("fc1",)))
        with pytest.raises(UsageError, match=r"lora\.targets='fc1': the model has no"):
            model.load(only, 0)


@pytest.mark.parametrize(
    ("kind", "task", "told"),
    [
        ("DistilBert", "text", "no language model of the kind distilbert; use a causal language"),
        ("Granite", "classify", "no classifier of texts of the kind granite; use another model"),
    ],
)
def test_a_kind_of_model_that_can_not_do_the_task(
    small: Path, tmp_path: Path, kind: str, task: str, told: str
) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    labels = ("safe", "unsafe") if task == "classify" else ()
    chosen = Settings(
        model=tmp_path,
        task=task,
        output=tmp_path / "out",
        data=Data(train=small / "test.jsonl"),
        classes=Classes(labels=labels),
    )
    with pytest.raises(UsageError, match=f"transformers has {told}"):
        model.shape(chosen)
