"""What a run on this machine writes is loaded by stock peft, answers, scores and merges."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.train.finetune import foresight, local
from entrenar_py.train.service import exit_codes
from entrenar_py.train.wire_io.processes import Crew, Hand
from tests.train.finetune import runs


# peft asks for what a later transformers will lack.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_a_run_writes_is_used(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`infer` and `merge` give the shares that stock peft computes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, figures = runs.configured(tmp_path, small), tmp_path / "figures"
    assert cli.main(["finetune", str(config), "--tensorboard", str(figures)]) == exit_codes.DONE
    output = tmp_path / "out"
    assert len(list(figures.glob("events.out.tfevents.*"))) == 1
    drawn = (output / "report.html").read_text(encoding="utf-8")
    last = (output / "ledger.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["chain"] in drawn
    assert drawn.count("<svg") == 3
    assert len(runs.told(output, "step")) == 5  # 36 rows in batches of 8
    assert "validation: loss" in capsys.readouterr().out
    assert cli.main(["finetune", str(config)]) == exit_codes.INVALID
    refused = capsys.readouterr()
    ways = "it already exists; continue with --resume, or give another `output:`"
    assert f"{output / 'state.checkpoint'}: {ways}" in refused.err
    assert not refused.out, "that was said before anything was read"
    written = output / "adapter_model.safetensors"
    assert written.stat().st_mode == (output / "metrics.jsonl").stat().st_mode
    adapters = json.loads((output / "adapter_config.json").read_text(encoding="utf-8"))
    assert Path(adapters["base_model_name_or_path"]) == (small / "model").absolute()
    assert not (output / "README.md").exists()

    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(small / "model")
    loaded = peft.PeftModel.from_pretrained(base, str(output)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    shares = loaded(**tokenizer("rm -rf /", return_tensors="pt")).logits[0].softmax(-1).tolist()

    assert cli.main(["infer", str(output), "--prompt", "rm -rf /"]) == exit_codes.DONE
    told = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert [float(told[label]) for label in ("safe", "unsafe")] == pytest.approx(shares, abs=1e-4)

    assert cli.main(["merge", str(output), str(tmp_path / "merged")]) == exit_codes.DONE
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    merged_shares = merged(**tokenizer("rm -rf /", return_tensors="pt")).logits[0].softmax(-1)
    assert merged_shares.tolist() == pytest.approx(shares, abs=1e-5)

    command = ["infer", str(output), "--prompt", "ls", "--new-tokens", "3"]
    assert cli.main(command) == exit_codes.INVALID
    assert "answers with classes (task: classify)" in capsys.readouterr().err

    assert cli.main(["eval", str(output), "--data", str(small / "test.jsonl")]) == exit_codes.DONE
    assert "of 400 right" in capsys.readouterr().out


# peft asks for what a later transformers will lack.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_in_16_bits_is_scored_and_merged(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scores are those of `eval`, and its merged weights have all of what was learned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, output = runs.configured(tmp_path, small, precision="bfloat16"), tmp_path / "out"
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "seen.jsonl")
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["data"] = {"train": "rows.jsonl", "validation": "seen.jsonl", "max_tokens": 64}
    config.write_text(json.dumps(settings), encoding="utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    (scored,) = runs.told(output, "evaluation")
    capsys.readouterr()
    assert (
        cli.main(["eval", str(output), "--data", str(tmp_path / "seen.jsonl")]) == exit_codes.DONE
    )
    assert capsys.readouterr().out.startswith(f"loss {scored['loss']:.4f}, ")
    assert cli.main(["merge", str(output), str(tmp_path / "merged")]) == exit_codes.DONE
    assert "bfloat16 weights became float32" in capsys.readouterr().out

    safetensors = pytest.importorskip("safetensors.torch")
    name = "model.layers.0.self_attn.q_proj"
    adapters = safetensors.load_file(output / "adapter_model.safetensors")
    a, b = (adapters[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    before = safetensors.load_file(small / "model" / "model.safetensors")[f"{name}.weight"]
    merged = safetensors.load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    learned = 4 / 2 * (b @ a)  # alpha / rank
    torch.testing.assert_close(merged - before.bfloat16().float(), learned, rtol=1e-3, atol=1e-7)


# peft asks for what a later transformers will lack.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_workers_have_the_settings_that_the_run_began_with(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that is changed afterwards is of no worker that is started then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = runs.configured(tmp_path, small, data={"validation_share": 0.0})
    monkeypatch.setattr(foresight, "look", lambda path, *rest: path.unlink())
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    assert runs.told(tmp_path / "out", "completed")


def test_workers_that_read_other_rows_are_told(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that changed after the run began is of another run; the last worker ends it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "LOOK_EVERY_S", 0.05)
    config = runs.configured(tmp_path, small, data={"validation_share": 0.0})

    def change(*_: object) -> None:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(rows.read_text(encoding="utf-8").replace("rm", "ls"), encoding="utf-8")

    monkeypatch.setattr(foresight, "look", change)
    assert cli.main(["finetune", str(config)]) == exit_codes.WRONG
    told = capsys.readouterr().out
    assert "worker 0 ended (refused: " in told
    assert "no worker is left: worker 0 ended" in told


def test_a_run_ends_when_no_worker_is_left(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers that die each time they are started are given up, and the reason is told."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(local, "work", runs.die)
    config = runs.configured(tmp_path, small, workers=2)
    assert cli.main(["finetune", str(config)]) == exit_codes.WRONG
    told = capsys.readouterr().out
    assert "worker 1 died (exit code 3) and is started again" in told
    assert "no worker is left" in told


def test_a_worker_that_cannot_start_again_is_told(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each look tries once more, until the worker is given up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(local, "work", runs.die)
    give, given = Crew.give, list[bytes]()

    def refuse(crew: Crew, job: bytes) -> Hand:
        given.append(job)
        if len(given) > 1:
            raise SystemFailure("no worker process starts")
        return give(crew, job)

    monkeypatch.setattr(Crew, "give", refuse)
    assert cli.main(["finetune", str(runs.configured(tmp_path, small))]) == exit_codes.WRONG
    told = capsys.readouterr().out
    assert told.count("worker 0: no worker process starts") == len(given) - 1 > 0
    assert "no worker is left" in told


def test_more_backends_than_shards(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker is started for each backend, so that one would have nothing to compute."""
    config = runs.configured(tmp_path, small, training={"num_shards": 2})
    command = ["finetune", str(config), "--backend", "cpu,cpu,cpu"]
    assert cli.main(command) == exit_codes.INVALID
    told = capsys.readouterr().err
    assert "--backend=cpu,cpu,cpu: " in told
    assert "has training.num_shards=2, so a worker would have no shard; use num_shards >= 3" in told


@pytest.mark.parametrize(("is_for_all", "goes_on"), [(True, True), (False, True), (True, False)])
def test_a_failure_that_concerns_all_workers_ends_the_run(
    *, is_for_all: bool, goes_on: bool
) -> None:
    """A shard that is missing, but not rows that changed before one worker began again.

    Workers of a run that a signal has stopped are not the reason for its end.
    """
    told = list[str]()
    workers = local._Workers(("cpu",))

    def give_up(reason: str) -> bool:
        told.append(reason)
        return goes_on

    workers._give_up = give_up
    answer = {"status": "failed", "reason": "no shard 3", "is_for_all": is_for_all}
    pipe = SimpleNamespace(poll=lambda: False)
    for rank, code, bytes_ in ((0, 0, json.dumps(answer).encode()), (1, None, None)):
        process = SimpleNamespace(exitcode=code)
        hand = SimpleNamespace(pipe=pipe, process=process, answer=bytes_)
        workers._hands[rank] = cast("Hand", hand)

    async def look() -> None:
        workers._look()

    asyncio.run(look())
    assert workers.are_gone is (is_for_all and goes_on)
    assert len(told) == is_for_all
    assert all("worker 0 ended (no shard 3)" in reason for reason in told)
