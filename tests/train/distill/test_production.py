"""The stage `entrenar distill logits`: right rows, each shard once, the same after any death."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.distill import manifest, shards, student, teacher
from entrenar_py.train.distill.shards import File
from entrenar_py.train.distill.teacher import Teacher
from entrenar_py.train.finetune import local, serving, settings_file
from entrenar_py.train.finetune.strategies import launch
from entrenar_py.train.model import preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.service import exit_codes
from tests.train.distill import made

LONG_S = 60.0


@pytest.fixture
def config(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made.configured(tmp_path, small)


def rows_in(config: Path) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return what each row of the shards has, by sample and position; each is there once."""
    prepared = preparation.prepare(settings_file.load(config))
    listed = manifest.read(config.parent / "shards")
    assert listed is not None
    places = student.places(prepared.train, 0, 12)
    found: dict[tuple[int, int], tuple[Any, ...]] = {}
    for shard in range(listed.facts.num_shards):
        file = File(config.parent / "shards", listed.facts, shard, places.starts(shard))
        for group in range(len(shards.groups(listed.facts, places.starts(shard)))):
            rows = file.read(group)
            for n in range(len(rows)):
                key = int(rows.sample[n]), int(rows.position[n])
                assert key not in found
                found[key] = rows.tokens[n], rows.log_probabilities[n], rows.rest[n]
    return found


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({"stored": "float32"}, 1e-5),
        ({"stored": "float16"}, 2e-2),
        ({"top_k": 512, "stored": "float32"}, 1e-5),
        ({"top_k": 1, "batch_tokens": 1}, 2e-2),
        ({"precision": "bfloat16"}, 0.03),
        ({"precision": "int8"}, 0.03),
    ],
)
def test_rows_are_the_teachers(
    config: Path, small: Path, tmp_path: Path, changes: dict[str, Any], apart: float
) -> None:
    """Each target has one row, of stock transformers' distribution of it."""
    import transformers

    made.configured(tmp_path, small, distill=changes)
    made.make_shards(config)
    found = rows_in(config)
    prepared = preparation.prepare(settings_file.load(config))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(small / "model").double().eval()
    due = set()
    for sample in range(len(prepared.train)):
        part = prepared.train.part(sample)
        tokens = torch.from_numpy(prepared.train.tokens[part].astype(np.int64))[None]
        with torch.no_grad():
            logs = model(input_ids=tokens).logits[0].log_softmax(-1)
        for target in np.flatnonzero(prepared.train.is_target[part]):
            due.add((sample, int(target) - 1))
            kept, values, rest = found[sample, int(target) - 1]
            right = logs[int(target) - 1]
            assert len(set(kept.tolist())) == len(kept)
            assert np.abs(values - right[kept.astype(np.int64)].numpy()).max() < apart
            if "precision" not in changes:
                others = np.setdiff1d(np.arange(512), kept)
                if len(others):
                    assert right[others].max() <= values.min() + apart
                    assert rest == pytest.approx(float(right[others].logsumexp(-1)), abs=apart)
                else:
                    assert rest == -np.inf
    assert set(found) == due


@pytest.mark.slow
@pytest.mark.parametrize("number", [8, pytest.param(50, marks=pytest.mark.by_hand)])
def test_killed_at_random_the_shards_are_the_same(
    config: Path, tmp_path: Path, number: int
) -> None:
    """At any moment. The process is started anew each time, and goes on."""
    undisturbed = made.files(made.make_shards(config))
    lines = (tmp_path / "shards" / "manifest.jsonl").read_bytes()
    (tmp_path / "shards").rename(tmp_path / "first")
    draw = random.Random(7)
    kills = 0
    while kills < number:
        child = Forked(config)
        # A run of it takes about half a second, and the first shard comes after half of that.
        time.sleep(draw.uniform(0.0, 0.6))
        if child.end() == -signal.SIGKILL:
            kills += 1
        elif (tmp_path / "shards").exists():
            (tmp_path / "shards").rename(tmp_path / f"again-{kills}-{draw.random()}")
    made.make_shards(config)
    for folder in [tmp_path / "shards", *tmp_path.glob("again-*")]:
        assert made.files(folder) == undisturbed
    assert (tmp_path / "shards" / "manifest.jsonl").read_bytes() == lines


class Forked:
    """The stage in a process that is forked from one with torch and transformers loaded."""

    def __init__(self, config: Path) -> None:
        from tests.train.service import nursery

        cache = str(config.parent / "cache")
        self._process = nursery.start(
            ["distill", "logits", str(config)], limit_bytes=None, cache=cache
        )

    def end(self) -> int:
        """Kill the process if it still runs; return its exit code."""
        self._process.kill()
        return self.wait()[0]

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return exit code and output."""
        told = self._process.stdout.read()
        self._process.stdout.close()
        return self._process.wait(LONG_S), told

    @property
    def runs(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid


@pytest.mark.parametrize("number", [4, pytest.param(40, marks=pytest.mark.by_hand)])
def test_two_producers_share_the_work_though_killed_in_turn(
    config: Path, small: Path, tmp_path: Path, number: int
) -> None:
    """Each is killed in the middle of a shard, and started again, while the other goes on.

    No shard is made twice: the list has each once, and the files are those of one process.
    """
    num_shards = 30 * number // 4
    made.configured(tmp_path, small, 4 * num_shards, distill={"shard_samples": 4})
    folder, both = tmp_path / "shards", [Forked(config), Forked(config)]
    for kill in range(number):
        one = both[kill % 2]
        while one.runs and one.pid not in manifest.being_made(folder, num_shards).values():
            time.sleep(0.001)
        one.end()
        both[kill % 2] = Forked(config)
    for one in both:
        code, told = one.wait()
        assert code == exit_codes.DONE, told
        assert "all shards are complete" in told
    lines = (tmp_path / "shards" / "manifest.jsonl").read_text("utf-8").splitlines()
    assert sorted(json.loads(line)["shard"] for line in lines[1:]) == list(range(num_shards))
    shared = made.files(tmp_path / "shards")
    (tmp_path / "shards").rename(tmp_path / "both")
    assert made.files(made.make_shards(config)) == shared


def test_parts_are_put_together(config: Path, tmp_path: Path) -> None:
    """Of machines that share no folder, by copying."""
    whole = made.files(made.make_shards(config))
    (tmp_path / "shards").rename(tmp_path / "whole")
    for part in ("2/2", "1/2"):
        assert cli.main(["distill", "logits", str(config), "--part", part]) == exit_codes.DONE
        (tmp_path / "shards").rename(tmp_path / part[0])
    for path in (tmp_path / "2").iterdir():
        if path.name != "claims.lock":
            path.rename(tmp_path / "1" / path.name)
    assert made.files(tmp_path / "1") == whole
    assert cli.main(["distill", "status", str(tmp_path / "1")]) == exit_codes.DONE


def test_a_disk_that_is_full_at_the_last_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files are in their places then, and the stage is not complete."""
    whole = made.files(made.make_shards(config))
    folder = config.parent / "shards"
    shutil.rmtree(folder)
    add = manifest.Writer.add

    def full(self: manifest.Writer, entry: manifest.Entry) -> manifest.Entry:
        if entry.shard == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(self, entry)

    with monkeypatch.context() as patched:
        patched.setattr(manifest.Writer, "add", full)
        assert cli.main(["distill", "logits", str(config)]) == exit_codes.FAILED
    shown = capsys.readouterr()
    told = r"shards can't be written \(No space left on device: [\d,]+ bytes are free there\); make"
    assert re.search(told, shown.err)
    assert made.files(folder) == whole
    assert cli.main(["distill", "status", str(folder)]) == exit_codes.WRONG
    (folder / ".shard-00003-of-00004.parquet.left").write_bytes(b"of a killed process")
    assert made.files(made.make_shards(config)) == whole
    assert not list(folder.glob(".shard*"))


def test_a_disk_that_takes_a_part_of_a_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, line, at: write(file, line[:7], at))
    folder = made.make_shards(config)
    assert cli.main(["distill", "status", str(folder)]) == exit_codes.DONE


def test_a_teacher_that_takes_no_such_rows(
    config: Path, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(small / "model", tmp_path / "short")
    path = tmp_path / "short" / "config.json"
    record = json.loads(path.read_text("utf-8")) | {"max_position_embeddings": 8}
    path.write_text(json.dumps(record), "utf-8")
    made.configured(tmp_path, small, distill={"teacher": str(tmp_path / "short")})
    assert cli.main(["distill", "logits", str(config)]) == exit_codes.INVALID
    assert "short: it takes rows of 8 tokens at most" in capsys.readouterr().err


def test_int8_is_refused_where_it_would_change_nothing() -> None:
    """Or where the model reads the weights of its layers itself."""
    import transformers

    sizes = {"vocab_size": 32, "num_hidden_layers": 1}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, **sizes))
    with pytest.raises(UsageError, match="GPT2LMHeadModel have no linear layer"):
        teacher._quantise(plain)
    config = transformers.MambaConfig(hidden_size=8, state_size=4, **sizes)
    reading: Any = transformers.MambaForCausalLM(config).bfloat16()
    teacher._quantise(reading)
    with pytest.raises(UsageError, match="MambaForCausalLM doesn't run with its linear layers"):
        teacher._require_running(reading)


def test_a_teacher_that_converts_what_its_head_takes() -> None:
    """Mamba's last hidden state is float32, its head's weights are not."""
    import transformers

    config = transformers.MambaConfig(
        vocab_size=32, hidden_size=8, state_size=4, num_hidden_layers=1
    )
    module: Any = transformers.MambaForCausalLM(config).bfloat16().eval()
    how: dict[str, Any] = {"top_k": 3, "stored": "float32", "known": 32}
    made_by = Teacher(module, torch.device("cpu"), **how)
    tokens = torch.tensor([[1, 2, 3, 4]])
    kept = made_by.kept(tokens, torch.arange(4))
    due = module(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1).topk(3)
    torch.testing.assert_close(kept.log_probabilities, due.values)


@pytest.mark.parametrize("top_k", [3, 32])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_the_stage(top_k: int, wrong: float) -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    logits[2, 9] = wrong
    kept = teacher.kept_of(logits, top_k=top_k, known=32, stored=torch.float32)
    assert kept.rest.isnan().tolist() == [False, False, True, False]
    batch: Any = object.__new__(teacher.Batch)
    batch.sample = batch.position = batch.target = np.arange(4, dtype=np.int32)
    with pytest.raises(SystemFailure, match="not finite in 1 of 4 rows, first at position 2"):
        batch.rows(kept)


def test_what_is_there_missing_and_damaged(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made.make_shards(config)
    whole = made.files(folder)
    made.moved(folder, tmp_path / "aside", 1)
    (folder / "shard-00002-of-00004.parquet").write_bytes(b"half")
    record = tmp_path / "status.json"
    given = ["distill", "status", str(folder), "--json", str(record)]
    capsys.readouterr()
    assert cli.main(given) == exit_codes.WRONG
    told = capsys.readouterr().out
    assert "2 of 4 shards" in told
    assert "missing: shard 1" in told
    assert "damaged: shard 2: shard-00002-of-00004.parquet has 4 bytes" in told
    assert json.loads(record.read_text("utf-8"))["is_whole"] is False
    assert made.files(made.make_shards(config)) == whole
    assert cli.main(given) == exit_codes.DONE
    assert json.loads(record.read_text("utf-8"))["rows"] == len(rows_in(config))


def test_a_template_with_a_clock_has_the_day_of_the_shards(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teacher and student go on after midnight with the day on which the shards were begun."""

    class Clock(datetime):
        on = "2026-11-28"

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromisoformat(cls.on)

    monkeypatch.setattr(preparation, "datetime", Clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "model"
    shutil.copytree(small / "model", own)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (own / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = made.configured(tmp_path, small, model=str(own), task="instruct")
    row = '{"instruction": "list", "output": "ls"}\n'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
    folder = made.make_shards(config)
    assert manifest.day_of(folder) == "2026-11-28"
    before, settings = made.files(folder), settings_file.load(config)
    Clock.on = "2026-11-29"
    made.make_shards(config)
    assert made.files(folder) == before
    with pytest.raises(
        UsageError, match=r"rows .*set data\.date: 2026-11-28.*here it is 2026-11-29"
    ):
        student.facts_of(preparation.prepare(settings))
    days = list[str | None]()

    def prepare(settings: Settings, *_: object, day: str | None = None) -> Prepared:
        days.append(day)
        raise UsageError("as far as this test goes")

    monkeypatch.setattr(preparation, "prepare", prepare)
    with pytest.raises(UsageError):
        local.train(config, resume=False)
    shared = {**json.loads(config.read_text()), "coordinator": {"secret_file": "secret"}}
    (tmp_path / "secret").write_text("open sesame, and do it soon")
    (tmp_path / "shared.yaml").write_text(json.dumps(shared))
    with pytest.raises(UsageError):
        serving.run(tmp_path / "shared.yaml", resume=False, halt_on_spike=False)
    monkeypatch.setattr(launch, "_first", lambda store, key, value: value)
    monkeypatch.setattr(launch, "settings_of", lambda _: settings)
    monkeypatch.setattr(launch, "together", lambda load: load())
    here = launch.World(rank=0, local_rank=0, size=1, on_host=1, device=torch.device("meta"))
    with pytest.raises(UsageError):
        launch._ready(config, here, cast("Any", object()))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda _: None)
    with pytest.raises(UsageError):
        launch._prepare(settings, here)
    assert days == ["2026-11-28"] * 4
