"""`infer`, `eval` and `merge` use what a run wrote with the model and tokenizer that it had."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.train.finetune import outputs, settings_file
from entrenar_py.train.model import model_folder, preparation, stock
from entrenar_py.train.service import exit_codes
from tests.train.finetune import runs


def test_folders_within_are_replaced(tmp_path: Path) -> None:
    """As tokenizers with several chat templates write them; the second export is as the first."""
    for text in ("first", "second"):
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            inner = partial / "additional_chat_templates"
            inner.mkdir()
            (inner / f"{text}.jinja").write_text(text)
            (partial / "config.json").write_text(text)
    (inner,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [path.read_text() for path in inner.iterdir()] == ["second"]
    assert inner.stat().st_mode & 0o100, "it can be entered"


class Sudden(BaseException):
    """An interrupt, which no library's handler of errors takes."""


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, FULL), ValueError(f"I/O error: {FULL}")])
def test_a_disk_that_fills_in_the_middle(tmp_path: Path, error: Exception) -> None:
    """The message names the file and what is free; the earlier output stays, and a later one comes.

    safetensors and tokenizers have exceptions of their own.
    """

    def export(content: str, problem: BaseException | None) -> None:
        with outputs.replacing(tmp_path, marks=["config.json"], advice="try again") as partial:
            (partial / "model.safetensors").write_text(content)
            if problem is not None:
                raise problem
            (partial / "config.json").write_text(content)

    export("first", None)
    told = rf"\(model\.safetensors: {FULL}: [\d,]+ bytes are free there\); try again"
    with pytest.raises(SystemFailure, match=told):
        export("second", error)
    with pytest.raises(Sudden):
        export("second", Sudden())
    names = ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name).read_text() for name in names] == ["first", "first"]
    export("third", None)
    assert [(tmp_path / name).read_text() for name in names] == ["third", "third"]


# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def written(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and adapters in `out` as a run of no step writes them."""
    folder = tmp_path_factory.mktemp("written")
    shutil.copytree(small / "model", folder / "model")
    settings = settings_file.load(runs.configured(folder, small, model=str(folder / "model")))
    prepared = preparation.prepare(settings, folder / "cache")
    workload = prepared.workload()
    tensors = workload.initial(np.random.default_rng(0))
    digest = preparation.model_digest(preparation.plan_of(settings, workload))
    outputs.write(prepared, workload, tensors, model_digest=digest)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of `written` that may be changed."""
    shutil.copytree(written, tmp_path / "copy")
    change(tmp_path / "copy", "model", str(tmp_path / "copy" / "model"))
    return tmp_path / "copy"


def change(folder: Path, key: str, value: object) -> None:
    """Set a key of `run.json`; None leaves it out."""
    path = folder / "out" / "run.json"
    record = json.loads(path.read_text("utf-8")) | {key: value}
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}), "utf-8")


def another_weight(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def another_configuration(folder: Path) -> None:
    path = folder / "model" / "config.json"
    record = json.loads(path.read_text("utf-8"))
    record["rms_norm_eps"] = 1e-5
    path.write_text(json.dumps(record), "utf-8")


def another_template(folder: Path) -> None:
    (folder / "out" / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")


def other_words(folder: Path) -> None:
    path = folder / "out" / "tokenizer.json"
    text = path.read_text("utf-8")
    path.write_text(text.replace('"sudo"', '"odus"'), "utf-8")


MODEL, TOKENIZER = (
    "its adapters were trained on a different model from",
    "its tokenizer is not the run",
)
ARGUMENTS = {"infer": ["--prompt", "ls"], "eval": ["--data", "rows.jsonl"], "merge": ["merged"]}


@pytest.mark.parametrize("command", ARGUMENTS)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (another_weight, MODEL),
        (another_configuration, MODEL),
        (another_template, TOKENIZER),
        (other_words, TOKENIZER),
    ],
)
def test_adapters_are_not_used_with_what_they_were_not_trained_on(
    damage: Callable[[Path], None],
    told: str,
    command: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both digests are told, and no answer, score or file is made."""
    noted = outputs.read_settings(folder / "out")[1]
    assert noted is not None
    damage(folder)
    assert cli.main([command, str(folder / "out"), *ARGUMENTS[command]]) == exit_codes.INVALID
    problem = capsys.readouterr()
    assert told in problem.err
    assert not problem.out
    due = noted.model if told is MODEL else noted.tokenizer
    found = model_folder.digest(folder / "model")
    if told is TOKENIZER:
        found = outputs.tokenizer_digest(folder / "out")
    assert found != due
    assert found in problem.err
    assert due in problem.err


def test_the_run_s_own_model_may_be_moved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What counts is the content, wherever it stands; nothing is said then."""
    (folder / "model").rename(folder / "moved")
    change(folder, "model", str(folder / "moved"))
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.DONE
    told = capsys.readouterr()
    assert "safe" in told.out
    assert "digest" not in told.err


def test_an_output_of_a_release_that_wrote_no_digests_is_used_with_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "digests", None)
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.DONE
    assert "an older release wrote no digests" in capsys.readouterr().err


@pytest.mark.parametrize("noted", [7, {}, {"model": 1, "tokenizer": "a"}, {"model": "a"}])
def test_digests_that_no_run_wrote(
    noted: object, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "digests", noted)
    assert cli.main(["infer", str(folder / "out"), "--prompt", "ls"]) == exit_codes.INVALID
    assert "run.json: digests=" in capsys.readouterr().err


def test_an_export_that_stock_libraries_read_otherwise_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are kept."""
    save = stock.save

    def forget_alpha(module: Any, tensors: Any, tokenizer: Any, folder: Path) -> None:
        save(module, tensors, tokenizer, folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"lora_alpha": 999}))

    monkeypatch.setattr(stock, "save", forget_alpha)
    settings, _ = outputs.read_settings(folder / "out")
    settings = replace(settings, output=folder / "again")
    prepared = preparation.prepare(settings, folder / "cache")
    workload = prepared.workload()
    ones = {spec.name: np.ones(spec.shape, np.float32) for spec in workload.specs}
    with pytest.raises(SystemFailure, match="stock libraries read there is not the model of this"):
        outputs.write(prepared, workload, ones, model_digest="")
    assert (folder / "again" / "adapter_model.safetensors").is_file()
