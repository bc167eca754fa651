"""Files of others make no library fetch, import or run anything that the user did not allow."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import model, model_folder
from entrenar_py.train.model.settings import Data, Settings
from entrenar_py.train.service import exit_codes

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


@pytest.fixture
def checkpoint(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small / "model", tmp_path / "model")
    return tmp_path / "model"


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
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa"'),
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


def test_no_library_of_a_hub_reaches_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kinds of model fetch kernels without any key that says so."""
    pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model_folder.library()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
