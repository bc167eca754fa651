"""`entrenar pipeline init` checks each answer at once, and writes what a coordinator reads."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from entrenar_py import entrenar as cli
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.service import config, exit_codes
from tests.train.plan.qwen3 import TINY

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder with a model's configuration and rows."""
    for needed in ("peft", "transformers"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(TINY), encoding="utf-8")
    Path("train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")


def asked(monkeypatch: pytest.MonkeyPatch, *answers: str, file: str = "run.yaml") -> int:
    """Return the exit code for these lines of input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in answers)))
    return cli.main(["pipeline", "init", file])


def test_defaults_make_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(monkeypatch, *[""] * 14) == exit_codes.DONE
    told = capsys.readouterr().out
    assert told.startswith("model: folder of the checkpoint [model]\n")
    assert "wrote run.yaml and secret\nnext: entrenar pipeline plan run.yaml" in told
    settings = settings_file.load(Path("run.yaml"))
    assert settings.coordinator is not None
    assert config.secret(settings.coordinator.secret_file)
    assert Path("secret").stat().st_mode & 0o777 == 0o600
    assert [stage.worker for stage in settings.stages] == [("worker-1",), ("worker-2",)]
    assert settings.stages[-1].layers[1] == TINY["num_hidden_layers"]
    assert "# Rows of a step, and the shards" in Path("run.yaml").read_text(encoding="utf-8")


def test_each_answer_is_checked_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    Path("short").write_text("abc", encoding="utf-8")
    answers = [
        *("nowhere", "model"),
        *("talk", "classify"),
        *("rows.txt", "rows.jsonl", "train.jsonl"),
        *("full", "new"),
        *("one", "a, a", "a, b, no"),
        *("foo", "q_proj"),
        *("0", "5", "2"),
        *("yes", "tpu", "cuda", "lots", "24GB"),
        *("yes", "b", "", ""),
        *("nohost", "0.0.0.0:7000"),
        *("short", "no/such/secret", "mine"),
    ]
    assert asked(monkeypatch, *answers) == exit_codes.DONE
    told = capsys.readouterr().out
    for message in (
        "  model=nowhere: no such folder; give one with a checkpoint",
        "  'talk': use instruct or classify or text",
        "  rows.txt: use a file of one of these kinds: .jsonl, .json, .parquet",
        "  rows.jsonl: no such file; give one with rows to train on",
        "  full: it is there, and not an empty folder; give a new one",
        "  'one': use 2 names or more, with commas between them",
        "  'a, a': a name is there twice; name each once",
        "  lora.targets='foo': the model has no layer of that name",
        "  '5': use a whole number from 1 to 4",
        "  'tpu': use cpu or cuda or wgpu",
        "  memory 'lots': use a number with its unit, such as 24GB or 24GiB",
        "  'yes': another worker has that name; use another one",
        "  address='nohost': use host:port",
        "  secret_file=short: 3 bytes; use at least",
        "  no/such/secret: the folder no/such does not exist; create it first",
    ):
        assert f"\n{message}" in told
    settings = settings_file.load(Path("run.yaml"))
    assert settings.classes.labels == ("a", "b", "no")
    assert settings.stages[0].worker == ("yes",)
    assert settings.stages[0].backend == "cuda"


def test_stages_that_do_not_fit_are_written_of_equal_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["", "", "", "", "", "2", "", "", "1MB", "", "", "8GB", "", ""]
    assert asked(monkeypatch, *answers) == exit_codes.DONE
    assert settings_file.load(Path("run.yaml")).stages == (
        StagePlan(layers=(0, 2), worker=("worker-1",), backend="cpu"),
        StagePlan(layers=(2, 4), worker=("worker-2",), backend="cpu"),
    )
    assert "the stages have equally many blocks, which may not fit: no cut fits" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [0, 3, 13])
def test_the_end_of_the_input_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    assert asked(monkeypatch, *[""] * number) == exit_codes.INVALID
    assert "the input ended before an answer to" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"model", "train.jsonl"}


def test_a_file_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy("train.jsonl", "mine.yaml")
    assert asked(monkeypatch, *[""] * 14, file="mine.yaml") == exit_codes.INVALID
    assert "mine.yaml: it exists already, and is not overwritten" in capsys.readouterr().err
    assert asked(monkeypatch, file="no/run.yaml") == exit_codes.INVALID
    assert "no/run.yaml: the folder no does not exist" in capsys.readouterr().err
    assert Path("mine.yaml").read_bytes() == Path("train.jsonl").read_bytes()
