"""A run is scored on the way, on the screen and in the metrics, and its bits stay the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.train.finetune import outputs, settings_file, task
from entrenar_py.train.finetune.task import Evaluator
from entrenar_py.train.model import evaluation, model, preparation
from entrenar_py.train.model.evaluation import Scores
from entrenar_py.train.service import exit_codes
from entrenar_py.train.service.run_events import Happening, Noted, Scored
from tests.train.finetune import runs

# peft asks for what a later transformers will lack.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tokenised rows out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_every_second_step(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 2 and 4 of 5 and the end are scored; the adapters are those of a run without."""
    for name, data in (("with", {}), ("without", {"validation_share": 0.0, "train": "few.jsonl"})):
        (tmp_path / name).mkdir()
        changes: dict[str, Any] = {"evaluate_every": 2} if name == "with" else {}
        config = runs.configured(tmp_path / name, small, data=data, **changes)
        if name == "without":
            _keep_trained(tmp_path, config)
        capsys.readouterr()
        assert cli.main(["finetune", str(config)]) == exit_codes.DONE
        if name == "with":
            told = capsys.readouterr().out
    scored = runs.told(tmp_path / "with" / "out", "evaluation")
    assert [one["step"] for one in scored] == [2, 4, 5]
    assert {tuple(one) for one in scored} == {
        (
            *("time", "what", "step", "loss", "weight", "perplexity", "accuracy", "classes"),
            *("confusion", "rows"),
        )
    }
    first, _, last = scored
    assert first["loss"] != last["loss"]
    assert last["weight"] == sum(map(sum, last["confusion"])) == 12
    assert [one["label"] for one in last["classes"]] == ["safe", "unsafe"]
    assert f"validation after step 2: loss {first['loss']:.4f}, accuracy " in told
    assert runs.told(tmp_path / "without" / "out", "evaluation") == []
    with_scores, without = (runs.adapters(tmp_path / name / "out") for name in ("with", "without"))
    assert with_scores == without


def test_the_best_and_the_last_are_kept(small: Path, tmp_path: Path) -> None:
    """Later commands take them, and a resumed run knows which is the best of its plan."""
    changes: dict[str, Any] = {"training": {"learning_rate": 1.0}, "evaluate_every": 1}
    config = runs.configured(tmp_path, small, keep={"best": True, "last": 2}, **changes)
    assert cli.main(["finetune", str(config)]) == exit_codes.DONE
    output = tmp_path / "out"
    losses = {line["step"]: line["loss"] for line in runs.told(output, "evaluation")}
    assert len(losses) == 5
    kept = {path.name: outputs.Kept.of(path) for path in output.iterdir() if path.is_dir()}
    best = min(losses, key=lambda step: losses[step])
    assert {name: one.step for name, one in kept.items() if one} == {
        "step-4": 4,
        "step-5": 5,
        "best": best,
    }
    assert best < 5, "the rate is so high that the last is not the best"
    assert runs.adapters(output / "step-5") == runs.adapters(output)
    assert runs.adapters(output / "best") != runs.adapters(output)
    assert cli.main(["infer", str(output / "best"), "--prompt", "ls"]) == exit_codes.DONE
    merge = ["merge", str(output / "step-4"), str(tmp_path / "merged")]
    assert cli.main(merge) == exit_codes.DONE

    prepared = preparation.prepare(settings_file.load(config))
    workload = prepared.workload()
    plan = preparation.plan_of(prepared.settings, workload)
    before = runs.adapters(output / "best")
    tensors = workload.initial(np.random.default_rng(0))
    task._Keeper(prepared, workload.module, plan).keep(3, losses[best], tensors)
    assert runs.adapters(output / "best") == before, "it is not better"
    assert (output / "step-3").exists() is False, "it is older than the last two"
    task._Keeper(prepared, workload.module, plan.with_(seed=9)).keep(3, 99.0, tensors)
    assert runs.adapters(output / "best") != before, "another run's best does not count"

    assert prepared.validation is not None
    digests = {line["rows"] for line in runs.told(output, "evaluation")}
    assert digests == {prepared.validation.digest}
    others = replace(prepared, validation=prepared.validation.chosen([0]))
    for now, loss, step in ((prepared, 99.0, 4), (prepared, 100.0, 4), (others, 100.0, 6)):
        task._Keeper(now, workload.module, plan).keep(step, loss, tensors)
        kept_best = outputs.Kept.of(output / "best")
        assert kept_best is not None
        assert kept_best.step == step, "losses of different rows are not compared"
    note = output / "best" / "kept.json"
    note.write_text(json.dumps({"run": plan.digest, "step": 1, "loss": 0.0}), "utf-8")
    task._Keeper(prepared, workload.module, plan).keep(7, 1.0, tensors)
    old = outputs.Kept.of(output / "best")
    assert old is not None
    assert (old.step, old.rows) == (1, None), "an older release noted no rows"


def _keep_trained(folder: Path, config: Path) -> None:
    """Write the rows that the run with a validation share trains on, in its order."""
    settings = settings_file.load(folder / "with" / "run.yaml")
    tokenizer = model.tokenizer(settings)
    rows = (folder / "with" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    found = preparation.prepare(settings).train
    texts = [tokenizer.decode(found.tokens[found.part(i)]) for i in range(len(found))]
    by_text = {json.loads(row)["text"]: row for row in rows}
    kept = "".join(by_text[text] + "\n" for text in texts)
    (config.parent / "few.jsonl").write_text(kept, encoding="utf-8")


# --- beside the run -------------------------------------------------------------------------------

TENSORS = {"w": np.zeros(3, np.float32)}
NO_SCORES = Scores(loss=0.5, weight=1, labels=(), confusion=np.zeros((0, 0), np.int64))


class Held:
    """An evaluation that ends when the test lets it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self, *_: object, go_on: Any, **__: object) -> Scores:
        while not self.go_on.wait(0.001):
            go_on()
        return NO_SCORES


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    made = Held()
    monkeypatch.setattr(evaluation, "scores", made)
    monkeypatch.setattr(Evaluator, "_put", lambda self, tensors: torch.nn.Linear(1, 1))
    return made


@pytest.fixture
def evaluator(small: Path, tmp_path: Path, held: Held) -> Iterator[Evaluator]:
    """Score every second step of 100."""
    config = runs.configured(tmp_path, small, evaluate_every=2)
    ready = preparation.prepare(settings_file.load(config))
    workload = ready.workload()
    plan = preparation.plan_of(ready.settings, workload).with_(num_steps=100)
    made = Evaluator(ready, workload, device=torch.device("cpu"), plan=plan)
    yield made
    made.close()


def test_no_step_waits_for_scores(evaluator: Evaluator, held: Held) -> None:
    """Steps go on while an evaluation lasts; its result is told later, in order."""
    heard: list[Happening] = []
    for made in range(1, 9):
        evaluator.stepped(made, lambda: TENSORS, heard.append)
    assert heard == []
    held.go_on.set()
    evaluator.settle(heard.append)
    assert [one.step for one in heard if isinstance(one, Scored)] == [2, 4, 6, 8]


def test_copies_that_wait_are_bounded(
    evaluator: Evaluator, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too many is left out, and said to be."""
    monkeypatch.setattr(task, "WAITING_BYTES", 2 * TENSORS["w"].nbytes)
    heard: list[Happening] = []
    for made in range(1, 7):
        evaluator.stepped(made, lambda: TENSORS, heard.append)
    held.go_on.set()
    evaluator.settle(heard.append)
    (note,) = [one for one in heard if isinstance(one, Noted)]
    assert note.text.startswith("validation after step 6 is skipped")
    assert [one.step for one in heard if isinstance(one, Scored)] == [2, 4]


def test_too_little_memory_ends_no_run(
    evaluator: Evaluator, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is due on the way is left out; at the end a GPU's rows are scored on the CPU."""
    places: list[str] = []

    def scores(module: object, *_: object, **__: object) -> Scores:
        places.append(evaluator._device.type)
        if len(places) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return NO_SCORES

    monkeypatch.setattr(evaluation, "scores", scores)
    evaluator._device = torch.device("cuda")
    heard: list[Happening] = []
    evaluator.stepped(2, lambda: TENSORS, heard.append)
    evaluator.settle(heard.append)
    (note,) = heard
    assert isinstance(note, Noted)
    assert "step 2 is skipped: it failed (CUDA out of memory)" in note.text
    assert evaluator.finish(4, TENSORS, heard.append) is NO_SCORES
    assert places == ["cuda", "cuda", "cpu"]


def test_a_result_that_can_not_be_scored_is_told(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is over, and what it made is written: a device that fails ends nothing then."""

    def fails(*_: object, **__: object) -> Scores:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(evaluation, "scores", fails)
    heard: list[Happening] = []
    assert evaluator.finish(4, TENSORS, heard.append) is None
    (note,) = heard
    assert isinstance(note, Noted)
    assert "step 4 is skipped: it failed (CUBLAS_STATUS_NOT_INITIALIZED)" in note.text


def test_scores_are_told_though_their_state_can_not_be_kept(
    evaluator: Evaluator, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full costs the kept folder only."""

    def full(*_: object) -> None:
        raise SystemFailure("output best: can't be written (No space left); make room")

    monkeypatch.setattr(evaluator._keeper, "keep", full)
    held.go_on.set()
    heard: list[Happening] = []
    evaluator.stepped(2, lambda: TENSORS, heard.append)
    evaluator.settle(heard.append)
    assert evaluator.finish(4, TENSORS, heard.append) is NO_SCORES
    assert [(type(one), one.step) for one in heard] == [
        *((Scored, 2), (Noted, 2)),
        *((Scored, 4), (Noted, 4)),
    ]
    note = heard[1]
    assert isinstance(note, Noted)
    assert note.text.startswith("the state after step 2 is not kept: output best: can't be written")


def test_what_waits_is_given_up_and_told(evaluator: Evaluator) -> None:
    """A run that is stopped does not wait for scores."""
    heard: list[Happening] = []
    evaluator.stepped(2, lambda: TENSORS, heard.append)
    evaluator.stepped(4, lambda: TENSORS, heard.append)
    evaluator.close(heard.append)
    evaluator.settle(heard.append)
    assert [(one.what, one.step) for one in heard if isinstance(one, Noted)] == [
        ("not_scored", 2),
        ("not_scored", 4),
    ]


@pytest.mark.parametrize(
    ("step", "rows", "scored"),
    [(2, "same", [4]), (2, None, [4]), (2, "others", [2, 4]), (4, "same", [2, 4])],
    ids=["scored", "by an older release", "other rows", "not scored"],
)
def test_a_resumed_run_scores_the_state_it_begins_with_unless_it_was(
    step: int, rows: str | None, scored: list[int], evaluator: Evaluator, held: Held
) -> None:
    """The run was stopped after step 2, perhaps before the scores were there."""
    prepared = evaluator._prepared
    assert prepared.validation is not None
    noted = {"what": "evaluation", "step": step, "loss": 0.5}
    if rows is not None:
        noted["rows"] = prepared.validation.digest if rows == "same" else rows
    prepared.settings.output.mkdir()
    (prepared.settings.output / task.METRICS).write_text(json.dumps(noted) + "\n", "utf-8")
    held.go_on.set()
    heard: list[Happening] = []
    for made in (2, 3, 4):
        evaluator.stepped(made, lambda: TENSORS, heard.append)
    evaluator.settle(heard.append)
    assert [one.step for one in heard if isinstance(one, Scored)] == scored


# --- the figures ----------------------------------------------------------------------------------


def test_scores_of_classes() -> None:
    confusion = np.array([[6, 2, 0], [1, 3, 0], [0, 0, 0]])
    scores = Scores(loss=0.5, weight=12, labels=("a", "b", "c"), confusion=confusion)
    told = task.event(scores, 7, "digest")
    assert (told.step, told.accuracy, told.perplexity) == (7, 0.75, None)
    a, _, c = told.classes
    assert (a.recall, a.precision) == (6 / 8, 6 / 7)
    assert a.f1 == pytest.approx(2 * (6 / 8) * (6 / 7) / (6 / 8 + 6 / 7))
    assert (c.recall, c.precision, c.f1) == (None, None, None)
    assert told.confusion == ((6, 2, 0), (1, 3, 0), (0, 0, 0))


def test_perplexity() -> None:
    assert task.event(NO_SCORES, 1, None).perplexity == pytest.approx(np.exp(0.5))
    absurd = Scores(loss=1e4, weight=1, labels=(), confusion=np.zeros((0, 0), np.int64))
    assert task.event(absurd, 1, None).perplexity is None
    assert next(absurd.lines()).endswith("perplexity inf")
