"""What a run learns is written into its scenario, so that another one can't go on from it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings, Training

USUAL = Lora(rank=2, alpha=4, dropout=0.1)


@pytest.fixture
def settings(small: Path, tmp_path: Path) -> Settings:
    """Settings of a run on a copy of the small checkpoint, with few rows."""
    shutil.copytree(small / "model", tmp_path / "model")
    rows = (small / "test.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return Settings(
        model=tmp_path / "model",
        task="classify",
        output=tmp_path / "out",
        data=Data(train=tmp_path / "rows.jsonl"),
        classes=Classes(labels=("safe", "unsafe")),
        lora=USUAL,
    )


def test_a_run_that_learns_something_else_has_another_scenario(settings: Settings) -> None:
    """So `--resume` names the setting; places, timing and other rounding don't count."""
    cache = settings.output / "cache"

    def options(of: Settings) -> dict[str, object]:
        made = preparation.prepare(of, cache)
        return dict(preparation.plan_of(of, made.workload()).options)

    usual = options(settings)
    changed = {
        "lora.alpha": replace(settings, lora=replace(USUAL, alpha=8)),
        "lora.dropout": replace(settings, lora=replace(USUAL, dropout=0.2)),
        "lora.rslora": replace(settings, lora=replace(USUAL, rslora=True)),
        "lora.targets": replace(settings, lora=replace(USUAL, targets=("q_proj",))),
        "precision": replace(settings, precision="bfloat16"),
        "classes.weights": replace(settings, classes=replace(settings.classes, weights="inverse")),
    }
    for name, other in changed.items():
        told = options(other)
        assert {key for key in told if told[key] != usual.get(key)} == {name}
    same = replace(settings, checkpoint_every=7, workers=2, recompute="blocks", compile=False)
    assert options(same) == usual
    assert options(replace(settings, method="full")).keys() < usual.keys()


@pytest.mark.parametrize(
    ("changes", "is_compiled", "told"),
    [
        ({}, False, "auto: no: all steps have 4 shards (worth it from 1,000 on)"),
        (
            {"training": Training(epochs=250, batch_size=8, num_shards=4)},
            True,
            "auto: on CUDA, without dropout: all steps have 1,000 shards",
        ),
        ({"compile": True}, True, "on CUDA, without dropout"),
        ({"compile": True, "strategy": "ddp"}, True, "on CUDA, without dropout"),
        ({"compile": False}, False, "no"),
        ({"compile": True, "recompute": "blocks"}, False, "no, with recompute: blocks"),
        ({"strategy": "fsdp"}, False, "no, with strategy: fsdp"),
    ],
)
def test_whether_a_run_compiles(
    settings: Settings, changes: dict[str, Any], is_compiled: bool, told: str
) -> None:
    """By the whole run's shards, so that resuming it or more workers can't change the kernels."""
    given = replace(settings, **{"training": Training(batch_size=8, num_shards=4), **changes})
    assert preparation.compiles(given, 8) is is_compiled
    assert preparation.compilation(given, 8).startswith(told)
    assert preparation.compilation(replace(given, compile="auto"), None)


def test_other_weights_or_rows_are_another_run(settings: Settings) -> None:
    """Their content counts, under the same names."""
    cache = settings.output / "cache"
    made = preparation.prepare(settings, cache)
    before = preparation.plan_of(settings, made.workload()).options
    safetensors = pytest.importorskip("safetensors.torch")
    path = settings.model / "model.safetensors"
    weights = safetensors.load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    safetensors.save_file(weights, path, {"format": "pt"})
    rows = settings.data.train
    lines = rows.read_text(encoding="utf-8").splitlines()
    told = {**json.loads(lines[0]), "text": "ls"}
    rows.write_text("\n".join([json.dumps(told), *lines[1:]]), encoding="utf-8")
    after = preparation.plan_of(settings, preparation.prepare(settings, cache).workload()).options
    assert {key for key in before if after[key] != before[key]} == {"model", "rows"}


def test_a_missing_folder_of_adapters_is_told_before_anything_is_read(settings: Settings) -> None:
    start = settings.output / "away"
    chosen = replace(settings, lora=replace(settings.lora, start_from=start))
    settings.data.train.unlink()
    with pytest.raises(UsageError, match=rf"lora\.start_from={start}: no such folder"):
        preparation.prepare(chosen)


def test_a_template_with_a_clock_is_told_one_day_in_a_run(settings: Settings) -> None:
    """The day of the run's ledger, or that of the configuration, which `--resume` then names."""
    rows = settings.data.train
    rows.write_text('{"instruction": "list", "output": "ls"}', encoding="utf-8")
    chats = replace(settings, task="instruct", classes=Classes())
    assert preparation.prepare(chats, settings.output / "cache").settings == chats
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (settings.model / "chat_template.jinja").write_text(template, encoding="utf-8")

    def made_on(day: str | None) -> preparation.Prepared:
        given = replace(chats, data=replace(chats.data, date=day))
        return preparation.prepare(given, settings.output / "cache")

    assert made_on(None).settings.data.date == datetime.now().astimezone().date().isoformat()
    ledger = {"scenario": {"options": {"data.date": "2024-02-29"}}}
    (settings.output / preparation.LEDGER).write_text(json.dumps(ledger) + "\n", encoding="utf-8")
    usual, other = made_on(None), made_on("2025-03-01")
    assert usual.settings.data.date == "2024-02-29"
    assert usual.tokenizer.decode(usual.train.tokens) == "29 Feb 2024listls"
    assert other.tokenizer.decode(other.train.tokens) == "01 Mar 2025listls"
    first, second = (
        dict(preparation.plan_of(one.settings, one.workload()).options) for one in (usual, other)
    )
    assert {key for key in first if first[key] != second[key]} == {"rows", "data.date"}
    with pytest.raises(UsageError, match=r"date='soon': is not a date; use one such as 2026-11-28"):
        made_on("soon")


def test_a_ledger_that_is_no_file_says_no_day(settings: Settings) -> None:
    """A FIFO without a writer is not waited for."""
    settings.output.mkdir()
    os.mkfifo(settings.output / preparation.LEDGER)
    assert preparation.day_of(settings) == datetime.now().astimezone().date().isoformat()
