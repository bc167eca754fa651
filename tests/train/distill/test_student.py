"""The student waits for shards, refuses those of others, and learns the same however it runs."""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.distill import student, teacher
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import objectives, preparation
from entrenar_py.train.model.objectives import IGNORED
from entrenar_py.train.service import exit_codes
from tests.train.distill import made
from tests.train.finetune import runs
from tests.train.finetune.strategies import ranks
from tests.train.service.cluster import cluster

ROWS, WIDTH, VOCABULARY = 23, 12, 61
MIXES = [(0.5, 2.0), (0.0, 1.0), (1.0, 3.0), (1.0, 0.5)]


def drawn(top_k: int, seed: int = 0) -> dict[str, Any]:
    """Return hidden states, a head, targets and a teacher's rows."""
    draw = torch.Generator().manual_seed(seed)
    teacher = (2 * torch.randn(ROWS, VOCABULARY, generator=draw)).log_softmax(-1)
    logs, tokens = teacher.topk(top_k, -1)
    left = 1 - logs.double().exp().sum(-1)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
    targets[4] = IGNORED
    return {
        "hidden": torch.randn(ROWS, WIDTH, generator=draw, requires_grad=True),
        "weight": (0.4 * torch.randn(VOCABULARY, WIDTH, generator=draw)).requires_grad_(),
        "teacher": teacher,
        "rows": Taught(targets, tokens, logs, left.clamp(min=0).log().float()),
    }


def dense(logits: Tensor, teacher: Tensor, targets: Tensor, mix: Mix) -> Tensor:
    """Return the loss as textbooks write it, over the whole vocabulary, in float64."""
    t, logits, teacher = mix.temperature, logits.double(), teacher.double()
    wanted = (teacher / t).softmax(-1)
    apart = F.kl_div((logits / t).log_softmax(-1), wanted, reduction="none").sum(-1)
    entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    mixed = mix.alpha * t * t * apart + (1 - mix.alpha) * entropy
    return (mixed * (targets != IGNORED)).sum()


@pytest.mark.parametrize("top_k", [1, 7, VOCABULARY - 1, VOCABULARY])
@pytest.mark.parametrize(("alpha", "temperature"), MIXES)
def test_the_fused_loss_is_the_plain_one(
    top_k: int, alpha: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In value and gradients, whatever number of positions is held at a time."""
    one = drawn(top_k)
    mix = Mix(alpha, temperature, has_rest=top_k < VOCABULARY)
    inputs = (one["hidden"], one["weight"])
    plain = student.of_logits(inputs[0] @ inputs[1].t(), one["rows"], mix)
    right = torch.autograd.grad(3 * plain, inputs)
    for held in (5, 100):
        monkeypatch.setattr(objectives, "LOGITS_MAX", held * VOCABULARY)
        fused = student.of_hidden(*inputs, one["rows"], mix)
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=0)
        for got, due in zip(torch.autograd.grad(3 * fused, inputs), right, strict=True):
            torch.testing.assert_close(got, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("alpha", "temperature"), MIXES)
def test_with_all_tokens_it_is_the_dense_loss(alpha: float, temperature: float) -> None:
    one, mix = drawn(VOCABULARY), Mix(alpha, temperature, has_rest=False)
    logits = one["hidden"] @ one["weight"].t()
    due = dense(logits, one["teacher"], one["rows"][0], mix)
    loss = student.of_logits(logits, one["rows"], mix)
    torch.testing.assert_close(loss.double(), due, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 7, VOCABULARY])
def test_a_student_that_is_its_teacher_is_not_apart(top_k: int) -> None:
    one, mix = drawn(top_k), Mix(1.0, 2.0, has_rest=top_k < VOCABULARY)
    logits = one["teacher"].clone().requires_grad_()
    loss = student.of_logits(logits, one["rows"], mix)
    assert abs(float(loss.detach())) < 1e-4
    assert float(torch.autograd.grad(loss, logits)[0].abs().max()) < 1e-5


def test_a_class_without_mass_counts_nothing() -> None:
    """Rounding may leave nothing for the rest, and a half can't hold what is unlikely."""
    teacher = torch.tensor([[0.0, -torch.inf]])
    own = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    apart = student.divergence(teacher, own, 1.0)
    assert float(apart.detach()) == pytest.approx(0.693147, rel=1e-5)
    assert torch.autograd.grad(apart.sum(), own)[0].isfinite().all()


@pytest.mark.parametrize("columns", [128, 1000, 3000, 12_345])
@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_the_largest_of_many(columns: int, top_k: int) -> None:
    """They are those of torch, also where some are equal."""
    draw = torch.Generator().manual_seed(columns)
    logits = torch.randn(9, columns, generator=draw).bfloat16()
    values, tokens = teacher.largest(logits, top_k)
    assert torch.equal(values, logits.topk(top_k).values)
    assert torch.equal(logits.gather(1, tokens), values)
    assert all(len(set(row)) == top_k for row in tokens.tolist())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(config: Path, *options: str, output: str = "out") -> bytes:
    """Train in processes of this machine; return the adapters."""
    assert cli.main(["distill", "train", str(config), *options]) == exit_codes.DONE
    return runs.adapters(config.parent / output)


def lacking_a_shard(small: Path, tmp_path: Path) -> tuple[Path, Path, bytes]:
    """Return a configuration, the folder of its shards and the adapters that all shards give.

    One shard is put aside, in the folder `aside`.
    """
    config = made.configured(tmp_path, small)
    folder = made.make_shards(config)
    whole = trained(config)
    shutil.rmtree(tmp_path / "out")
    made.moved(folder, tmp_path / "aside", 2)
    return config, folder, whole


def test_it_ends_the_same_whenever_shards_come(small: Path, tmp_path: Path) -> None:
    """It is started before there is a list, and shards come while it trains."""
    config = made.configured(tmp_path, small, training={"epochs": 2})
    folder = made.make_shards(config)
    afterwards = trained(config)
    shutil.rmtree(tmp_path / "out")
    folder.rename(tmp_path / "all")

    def copy(*names: str) -> None:
        for name in names:
            shutil.copy(tmp_path / "all" / name, folder / f".{name}")
            (folder / f".{name}").rename(folder / name)

    first, *others = sorted(made.files(tmp_path / "all"))
    with cluster(tmp_path) as machines:
        started = machines.start("distill", "train", config)
        started.until("waits for the first list")
        folder.mkdir()
        copy("manifest.jsonl")
        time.sleep(0.5)  # it looks at the list, and for a shard that is not there
        copy(first)
        started.until(r"step 1/10 ")
        copy(*others)
        assert started.code() == exit_codes.DONE, started.text
    assert runs.adapters(tmp_path / "out") == afterwards


@pytest.mark.by_hand
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_step_that_waits(
    small: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """After some seconds; the run goes on from there when the shard is there."""
    config, folder, whole = lacking_a_shard(small, tmp_path)
    with cluster(tmp_path) as machines:
        waiting = machines.start("distill", "train", config)
        waiting.until(r"step 1/5 ")
        waiting.signal(number)
        waiting.until("10 s at most")
        assert waiting.code() == exit_codes.STOPPED, waiting.text
    shutil.copytree(tmp_path / "aside", folder, dirs_exist_ok=True)
    assert trained(config, "--resume") == whole


def test_any_number_of_workers_and_packing(small: Path, tmp_path: Path) -> None:
    """Packed samples see themselves alone: their losses are those of rows of their own."""
    config = made.configured(tmp_path, small, workers=1, output="apart")
    made.make_shards(config)
    trained(config, output="apart")
    made.configured(tmp_path, small, data={"packing": True}, workers=1)
    alone = trained(config)
    apart, packed = (runs.told(tmp_path / name, "step") for name in ("apart", "out"))
    losses = [one["loss"] for one in packed]
    assert losses == pytest.approx([one["loss"] for one in apart], rel=1e-5)
    shutil.rmtree(tmp_path / "out")
    made.configured(tmp_path, small, data={"packing": True}, workers=3)
    assert trained(config) == alone


@pytest.mark.by_hand
@pytest.mark.slow
def test_a_student_that_is_killed_again_and_again(small: Path, tmp_path: Path) -> None:
    """Each time once it has made a step; it goes on from its last checkpoint."""
    config = made.configured(tmp_path, small, checkpoint_every=1, training={"epochs": 3})
    made.make_shards(config)
    undisturbed = trained(config)
    shutil.rmtree(tmp_path / "out")
    kills = 0
    with cluster(tmp_path) as machines:
        while kills < 4:
            student_run = machines.start("distill", "train", config, "--resume")
            student_run.until(r"step \d+/15 ")
            time.sleep(0.05 * kills)
            student_run.kill()
            kills += 1
    assert trained(config, "--resume") == undisturbed


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.by_hand)])
def test_ranks_of_torchrun(small: Path, tmp_path: Path, strategy: str) -> None:
    """They have the losses of one process, but for the order of sums."""
    config = made.configured(tmp_path, small)
    made.make_shards(config)
    trained(config)
    alone = [one["loss"] for one in runs.told(tmp_path / "out", "step")]
    made.configured(tmp_path, small, strategy=strategy, output="ranks")
    codes, told = ranks.torchrun(config, 2)
    assert codes == [exit_codes.DONE] * 2, told
    losses = [one["loss"] for one in runs.told(tmp_path / "ranks", "step")]
    assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.wgpu
@pytest.mark.by_hand
def test_a_student_on_wgpu(small: Path, tmp_path: Path) -> None:
    """Rows in float16 are float32 there, as all that a shader reads."""
    config = made.configured(tmp_path, small)
    made.make_shards(config)
    trained(config)
    alone = [one["loss"] for one in runs.told(tmp_path / "out", "step")]
    made.configured(tmp_path, small, output="device")
    given = ["distill", "train", str(config), "--backend", "wgpu"]
    assert cli.main(given) == exit_codes.DONE
    losses = [one["loss"] for one in runs.told(tmp_path / "device", "step")]
    assert losses == pytest.approx(alone, rel=2e-5)


@pytest.mark.by_hand
def test_alpha_0_is_a_plain_finetuning(small: Path, tmp_path: Path) -> None:
    """But for rounding: the same samples in the same steps, and the same losses."""
    config = made.configured(tmp_path, small, distill={"alpha": 0.0})
    made.make_shards(config)
    trained(config)
    losses = [one["loss"] for one in runs.told(tmp_path / "out", "step")]
    record = json.loads(config.read_text("utf-8"))
    del record["distill"]
    config.write_text(json.dumps({**record, "output": "plain"}), "utf-8")
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    plain = [one["loss"] for one in runs.told(tmp_path / "plain", "step")]
    assert losses == pytest.approx(plain, rel=1e-5)


def test_workers_of_other_machines_have_copies(small: Path, tmp_path: Path) -> None:
    config = made.configured(tmp_path, small)
    folder = made.make_shards(config)
    alone = trained(config)
    shutil.rmtree(tmp_path / "out")
    with cluster(tmp_path) as machines:
        section = {"listen": machines.address, "secret_file": "secret"}
        made.configured(tmp_path, small, coordinator=section)
        serving = machines.coordinator(cache=tmp_path / "own")
        without = machines.worker(cache=tmp_path / "theirs")
        assert without.code() == exit_codes.INVALID
        assert "give their folder by --logits" in without.text
        # One that waits for shards ends when it is told to, before it has joined and afterwards.
        waiting = machines.worker("--logits", tmp_path / "none", cache=tmp_path / "theirs")
        waiting.until("waits for the first list")
        waiting.signal(signal.SIGTERM)
        assert waiting.code() == exit_codes.STOPPED, waiting.text
        shutil.copytree(folder, tmp_path / "copy")
        made.moved(tmp_path / "copy", tmp_path / "aside", 0)
        waiting = machines.worker("--logits", tmp_path / "copy", cache=tmp_path / "theirs")
        waiting.until("takes part")
        waiting.signal(signal.SIGTERM)
        assert waiting.code() == exit_codes.STOPPED, waiting.text
        shutil.copytree(tmp_path / "aside", tmp_path / "copy", dirs_exist_ok=True)
        worker = machines.worker("--logits", tmp_path / "copy", cache=tmp_path / "theirs")
        assert worker.code() == serving.code() == exit_codes.DONE, worker.text + serving.text
    assert runs.adapters(tmp_path / "out") == alone


@pytest.mark.by_hand
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_shard_that_does_not_come(
    small: Path, tmp_path: Path, is_damaged: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run ends with one message, and goes on from there when the shard is there."""
    config, folder, whole = lacking_a_shard(small, tmp_path)
    if is_damaged:
        (folder / "shard-00002-of-00004.parquet").write_bytes(b"half")
    capfd.readouterr()
    assert cli.main(["distill", "train", str(config), "--no-follow"]) == exit_codes.WRONG
    captured = capfd.readouterr()
    why = "has 4 bytes, but" if is_damaged else "is listed, but missing"
    assert captured.out.count(f"shard-00002-of-00004.parquet {why}") >= 1
    assert "Traceback" not in captured.err
    shutil.copy(tmp_path / "aside" / "shard-00002-of-00004.parquet", folder)
    assert trained(config, "--resume") == whole


def test_shards_of_others_are_refused(small: Path, tmp_path: Path) -> None:
    """By what differs: the tokenizer, the rows, a setting."""
    config = made.configured(tmp_path, small)
    made.make_shards(config)
    for num_rows, changes, told in (
        (39, {}, "its shards were made from rows"),
        (40, {"top_k": 9}, "made with top_k=8, and distill.top_k is 9"),
        (40, {"stored": "float32"}, "made with stored=float16"),
        (40, {"shard_samples": 5}, "made with shard_samples=12, and distill.shard_samples is 5"),
    ):
        made.configured(tmp_path, small, num_rows, distill=changes)
        with pytest.raises(UsageError, match=told):
            student.workload(preparation.prepare(settings_file.load(config)))
    other = tmp_path / "other"
    shutil.copytree(small / "model", other)
    text = (other / "tokenizer.json").read_text("utf-8")
    record = json.loads(text)
    record["model"]["vocab"] = dict(
        zip(record["model"]["vocab"], reversed(record["model"]["vocab"].values()), strict=True)
    )
    (other / "tokenizer.json").write_text(json.dumps(record), "utf-8")
    made.configured(tmp_path, small, model=str(other))
    prepared = preparation.prepare(settings_file.load(config))
    with pytest.raises(UsageError, match="by `entrenar distill text`"):
        student.workload(prepared)
    assert cli.main(["distill", "logits", str(config)]) == exit_codes.INVALID


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"task": "classify", "classes": {"labels": ["a", "b"]}},
            "a teacher's logits are for next",
        ),
        ({"strategy": "tensor_parallel"}, "a student's loss needs the whole"),
        ({"distill": {"top_k": 513}}, "top_k=513: the teacher's vocabulary has 512 tokens"),
        ({"distill": {"teacher": None}}, "distill.teacher is missing"),
        ({"distill": {"teacher": "/no/such"}}, "/no/such"),
        ({"distill": {"alpha": 1.5}}, "alpha=1.5: use a number >= 0 and <= 1"),
        ({"distill": {"temperature": 0}}, "temperature=0: use a number > 0"),
        ({"distill": None}, "distill is missing: the section names the teacher"),
    ],
)
def test_what_can_not_be_used_is_told_once(
    small: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = made.configured(tmp_path, small, **changes)
    assert cli.main(["distill", "logits", str(config)]) == exit_codes.INVALID
    assert told in capsys.readouterr().err
    assert not (tmp_path / "shards").exists()


def test_no_list_and_no_waiting(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made.configured(tmp_path, small)
    assert cli.main(["distill", "train", str(config), "--no-follow"]) == exit_codes.INVALID
    assert "there are no shards" in capsys.readouterr().err
    assert cli.main(["distill", "status", str(tmp_path)]) == exit_codes.INVALID


def test_a_student_that_has_the_kept_tokens_alone(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher with a padded head: nothing of the student is in the rest."""
    config = made.configured(tmp_path, small)
    prepared = preparation.prepare(settings_file.load(config))
    facts = replace(made.FACTS, vocabulary=520, top_k=512)
    monkeypatch.setattr(student, "facts_of", lambda *_: facts)
    found = student.workload(prepared)
    assert isinstance(found, student.Student)
    assert not found.mix.has_rest
    logits, all_tokens = torch.linspace(-1, 1, 512)[None], torch.arange(512)[None]
    shares = torch.full((1, 512), -7.0)
    taught = Taught(torch.tensor([3]), all_tokens, shares, torch.tensor([-5.0]))
    assert student.of_logits(logits, taught, found.mix).isfinite()
