"""A checkpoint is the model that its config.json describes, no more and no less, or is refused."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import model, model_folder
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings
from entrenar_py.train.service import exit_codes
from tests.train.model import checkpoints

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

LAYER = "model.layers.0.self_attn.q_proj"
EMBEDDINGS = "model.embed_tokens.weight"
BLOCKED = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()


def settings(folder: Path, task: str = "text", target: str = "q_proj") -> Settings:
    return Settings(
        model=folder,
        task=task,
        output=folder / "out",
        data=Data(train=folder / "rows.jsonl"),
        classes=Classes(labels=("safe", "unsafe") if task == "classify" else ()),
        lora=Lora(rank=2, targets=(target,)),
    )


@pytest.fixture
def checkpoint(small: Path, tmp_path: Path) -> Path:
    """The small Qwen3, whose head is tied to its embeddings."""
    shutil.copytree(small / "model", tmp_path / "model")
    return tmp_path / "model"


def add(folder: Path, tensors: Callable[[dict[str, Any]], dict[str, torch.Tensor]]) -> None:
    """Add what `tensors` makes of a checkpoint's weights to them."""
    torch_files = pytest.importorskip("safetensors.torch")
    held = torch_files.load_file(folder / "model.safetensors")
    held |= tensors(held)
    torch_files.save_file(held, folder / "model.safetensors", {"format": "pt"})


SURPLUS = {
    f"{LAYER}.bias": (64,),  # config.json: attention_bias is false
    "model.layers.2.mlp.up_proj.weight": (192, 64),  # and it has two blocks
    f"base_model.model.{LAYER}.lora_A.weight": (2, 64),
    f"{LAYER}.lora_B.default.weight": (64, 2),
    "v_head.summary.weight": (1, 64),  # a head that no language model has
}


@pytest.mark.parametrize("name", SURPLUS)
def test_a_weight_that_the_model_would_be_trained_without_is_refused(
    name: str, checkpoint: Path
) -> None:
    """transformers warns of it, and goes on with another model than the checkpoint."""
    add(checkpoint, lambda _: {name: torch.ones(SURPLUS[name])})
    with pytest.raises(UsageError, match=r"and not in the model by config\.json") as refused:
        model.load(settings(checkpoint), 0)
    assert name in str(refused.value)


def test_a_coordinator_of_stages_sees_surplus_weights_too(checkpoint: Path) -> None:
    """It loads no block, and tells one that is removed from one that the model lacks."""
    model.without_weights(settings(checkpoint), 0)
    name = "model.layers.2.mlp.up_proj.weight"
    add(checkpoint, lambda _: {name: torch.ones(SURPLUS[name])})
    with pytest.raises(UsageError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is in its files"):
        model.without_weights(settings(checkpoint), 0)


def test_a_head_that_is_tied_in_one_place_and_not_in_the_other_is_refused(
    checkpoint: Path,
) -> None:
    """The same numbers twice are no contradiction."""
    add(checkpoint, lambda held: {"lm_head.weight": held[EMBEDDINGS].clone()})
    model.load(settings(checkpoint), 0)
    add(checkpoint, lambda held: {"lm_head.weight": held[EMBEDDINGS] + 1})
    with pytest.raises(UsageError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        model.load(settings(checkpoint), 0)


def test_what_models_compute_today_may_be_stored(small: Path, tmp_path: Path) -> None:
    """Positions' frequencies and causal masks, of files from earlier releases."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}
    config = transformers.GPTJConfig(**sizes, n_positions=128, bos_token_id=1, eos_token_id=1)
    old = checkpoints.settings(small, tmp_path / "old", config).model
    model_folder.notes()
    mask = {"transformer.h.0.attn.bias": BLOCKED, "h.1.attn.masked_bias": torch.tensor(-1e4)}
    add(old, lambda _: mask)
    model.load(settings(old), 0)
    add(old, lambda _: {"transformer.h.0.attn.bias": torch.ones(32)})  # no mask at all
    with pytest.raises(UsageError, match=r"h\.0\.attn\.bias is in its files"):
        model.load(settings(old), 0)
    llama = checkpoints.settings(small, tmp_path / "llama", checkpoints.llama()).model
    add(llama, lambda _: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    model.load(settings(llama), 0)
    assert model_folder.notes() == []
    add(llama, lambda _: {"model.mtp_layers.0.mlp.up_proj.weight": torch.ones(48, 32)})
    model.load(settings(llama), 0)
    assert "its files have mtp_layers, which task: text has no use for" in model_folder.notes()[0]


def test_a_head_that_the_task_replaces_is_told(small: Path, tmp_path: Path) -> None:
    """Of an encoder as it is published: two heads and a pooler, of which one is of use."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=512, num_attention_heads=2, **sizes)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    model_folder.notes()
    model.load(settings(tmp_path, "classify", "query"), 0)
    (told,) = model_folder.notes()
    assert "its files have cls, which task: classify has no use for" in told
    add(tmp_path, lambda _: {"bert.encoder.layer.1.output.dense.bias": torch.ones(16)})
    with pytest.raises(UsageError, match=r"bert\.encoder\.layer\.1\.output\.dense\.bias is in its"):
        model.load(settings(tmp_path, "classify", "query"), 0)


def test_what_transformers_warns_of_is_told(checkpoint: Path) -> None:
    """A key that has no effect is not a fault, and not a secret either."""
    path = checkpoint / "config.json"
    record = json.loads(path.read_text("utf-8"))
    record["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "hurry": 2}
    path.write_text(json.dumps(record), encoding="utf-8")
    model_folder.notes()
    model.load(settings(checkpoint), 0)
    (told,) = model_folder.notes()
    assert told.startswith("transformers: ")
    assert "hurry" in told
    assert model_folder.notes() == []


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        # The number in config.json is that after stretching.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            512,
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_stretched_positions_count(
    key: str, rope: dict[str, Any], positions: int, checkpoint: Path
) -> None:
    """The small model has 512 before they are stretched; rows may have as many tokens."""
    path = checkpoint / "config.json"
    record = json.loads(path.read_text("utf-8")) | {key: {**rope, "rope_theta": 1e4}}
    if key == "rope_scaling":  # as earlier releases wrote it
        del record["rope_parameters"]
        record |= {"rope_theta": record[key].pop("rope_theta")}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert model_folder.longest(model.shape(settings(checkpoint))) == positions


def test_kinds_of_layers_with_positions_of_their_own_take_the_shortest() -> None:
    """Of Gemma 3, only full attention is stretched, and config.json has the number after that."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        max_position_embeddings=4096,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    module = torch.nn.Module()
    module.config = config
    assert model_folder.longest(module) == 4096


def test_a_loss_of_a_router_that_would_be_left_out_is_refused() -> None:
    """transformers.Trainer adds it, and it is no sum over the parts of a batch."""
    transformers = pytest.importorskip("transformers")
    module, chosen = torch.nn.Module(), settings(Path("mixtral"))

    def of(**keys: Any) -> Any:
        module.config = transformers.MixtralConfig(**keys)
        return module

    model_folder.require_own_loss(chosen, of())
    model_folder.require_own_loss(chosen, of(output_router_logits=True, router_aux_loss_coef=0.0))
    model_folder.require_own_loss(
        settings(Path("mixtral"), "classify"), of(output_router_logits=True)
    )  # a classifier of transformers has no such loss
    told = r"\(output_router_logits: true, router_aux_loss_coef: 0\.02\), which entrenar does not"
    with pytest.raises(UsageError, match=told):
        model_folder.require_own_loss(
            chosen, of(output_router_logits=True, router_aux_loss_coef=0.02)
        )


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "CLIP", "Granite", "DistilBert", "Gemma3", "Bert"])
def test_advice_for_a_kind_of_model_does_not_lead_in_a_circle(kind: str, tmp_path: Path) -> None:
    """Whoever uses the task that a refusal names is not refused for that."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")()
    config.save_pretrained(tmp_path)
    told = dict[str, str]()
    for task in ("text", "classify"):
        try:
            model_folder.configuration(settings(tmp_path, task))
        except UsageError as error:
            told[task] = str(error)
    for task, other in (("text", "classify"), ("classify", "text")):
        if f"or task: {other}" in told.get(task, ""):
            assert other not in told, "it was refused, too"
    if len(told) == 2:
        assert all("of texts only" in one for one in told.values())
    assert len(told) == {"Qwen2_5_VL": 2, "CLIP": 2, "Granite": 1, "DistilBert": 1}.get(kind, 0)


# Run when it is imported: what a foreign checkpoint brings with it.
EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config):
    model_type = "evil"
class Model(Qwen3ForCausalLM):
    config_class = Config
"""


def change(path: Path, **keys: Any) -> None:
    """Set keys of the JSON file at `path`."""
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(record | keys), encoding="utf-8")


@pytest.mark.parametrize("command", ["infer", "merge", "eval"])
def test_a_foreign_output_folder_brings_no_consent_to_run_its_python(
    command: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run.json` says that the run was allowed to; the command line alone says it for this one."""
    mark, out = tmp_path / "ran", tmp_path / "out"
    (checkpoint / "evil.py").write_text(EVIL.format(mark=str(mark)), encoding="utf-8")
    mapped = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(checkpoint / "config.json", model_type="evil", auto_map=mapped)
    shutil.copytree(checkpoint, out)
    settings = {"model": str(checkpoint), "task": "text", "output": str(out), "method": "full"}
    rows = {"train": str(tmp_path / "rows.jsonl")}
    run = {**settings, "data": rows, "trust_remote_code": True}
    (out / "run.json").write_text(json.dumps(run), encoding="utf-8")
    more = {"infer": ["--prompt", "ls"], "merge": [str(tmp_path / "to")], "eval": ["--data", "x"]}
    assert cli.main([command, str(out), *more[command]]) == exit_codes.INVALID
    told = capsys.readouterr().err
    assert "give --trust-remote-code if you trust" in told
    assert not mark.exists()
    if command == "infer":  # with consent it is run
        code = cli.main([command, str(out), "--trust-remote-code", *more[command]])
        assert (code, mark.exists()) == (exit_codes.DONE, True), capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"_attn_implementation": "owner/kernel"}, '_attn_implementation="owner/kernel"'),
        ({"attn_implementation": "owner/kernel@v1:fn"}, 'attn_implementation="owner/kernel@v1:fn"'),
        ({"attn_implementation": "paged|owner/kernel"}, "paged|owner/kernel"),
        ({"attn_implementation": {"": "sdpa", "text_config": "o/k"}}, 'attn_implementation="o/k"'),
        ({"text_config": {"_attn_implementation": "owner/kernel"}}, "owner/kernel"),
        ({"experts_implementation": "owner/kernel"}, 'experts_implementation="owner/kernel"'),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights="),
    ],
)
def test_a_configuration_that_fetches_code_or_reads_other_weights(
    keys: Mapping[str, Any], told: str, checkpoint: Path
) -> None:
    """No consent covers what is not in the checkpoint's folder."""
    change(checkpoint / "config.json", **keys)
    with pytest.raises(UsageError, match=r"config\.json has .* makes a library fetch") as refused:
        model_folder.require_config(checkpoint)
    assert told in str(refused.value)


@pytest.mark.parametrize("value", ["sdpa", "eager", None, {"": "eager"}])
def test_code_that_is_part_of_transformers_may_be_named(value: object, checkpoint: Path) -> None:
    change(checkpoint / "config.json", attn_implementation=value)
    model_folder.require_config(checkpoint)


def test_a_tokenizer_whose_words_are_behind_an_address(checkpoint: Path, tmp_path: Path) -> None:
    """Paths of the machine that wrote it are common, and nothing reads them."""
    settings = Settings(
        model=checkpoint, task="text", output=tmp_path / "out", data=Data(train=tmp_path)
    )
    change(checkpoint / "tokenizer_config.json", special_tokens_map_file="/home/me/map.json")
    model.tokenizer(settings)
    change(checkpoint / "tokenizer_config.json", vocab_file="https://example.org/vocab")
    with pytest.raises(UsageError, match=r'vocab_file="https://example\.org/vocab"'):
        model.tokenizer(settings)


ADAPTERS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, r'megatron_config=\{"a": 1\}'),
        ({"peft_type": "PROMPT_TUNING"}, 'peft_type="PROMPT_TUNING"'),
        ({"peft_type": "XLORA", "adapters": {"0": "owner/adapters"}}, 'peft_type="XLORA"'),
        ({"auto_mapping": {"parent_library": "evil"}}, "auto_mapping="),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa", and only true is accepted'),
        ({}, "no adapter_model.safetensors there"),
    ],
)
def test_adapters_that_no_run_of_ours_wrote(
    keys: Mapping[str, Any], told: str, tmp_path: Path
) -> None:
    """peft would import a module, load another model, or unpickle adapters."""
    pytest.importorskip("peft")
    change(tmp_path / "adapter_config.json", **{**ADAPTERS, **keys})
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(UsageError, match=told):
        model_folder.require_adapters(tmp_path)


def test_adapters_of_experts_have_ranks_of_their_own(tmp_path: Path) -> None:
    """peft writes these keys for the experts of some models, and loads nothing because of them."""
    pytest.importorskip("peft")
    ranks = {r".*\.gate_up_proj": 4}
    keys = {"rank_pattern": ranks, "alpha_pattern": ranks, "target_parameters": ["gate_up_proj"]}
    change(tmp_path / "adapter_config.json", **{**ADAPTERS, **keys})
    (tmp_path / "adapter_model.safetensors").touch()
    model_folder.require_adapters(tmp_path)


def test_libraries_are_loaded_without_a_compiler() -> None:
    """Only while they are imported: afterwards blocks are compiled."""
    pytest.importorskip("peft")
    from entrenar_py.train.model import libraries

    def twice(x: float) -> float:
        return 2 * x

    compiles = torch.compile
    with libraries._in_less_time():
        assert torch.compile(twice) is twice
        assert torch.compile(dynamic=False)(twice) is twice
        with pytest.raises(ImportError):
            importlib.import_module("sklearn")
    assert torch.compile is compiles
    assert "sklearn" not in sys.modules


def test_no_library_of_a_hub_reaches_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kinds of model fetch kernels without any key that says so."""
    pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model_folder.library()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
