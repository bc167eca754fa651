"""Makes the configuration of a layer pipeline from answers to questions.

Each stage gets the blocks that are fastest of those that fit its worker's memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model import blocks, model, model_folder
from entrenar_py.train.model.settings import (
    KINDS,
    LAYER_PIPELINE,
    TASKS,
    Classes,
    Data,
    Lora,
    Serving,
    Settings,
    StagePlan,
)
from entrenar_py.train.plan import devices
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan.stages import plan_text, planned
from entrenar_py.train.plan.stages.questions import Questions, names, number, one_of
from entrenar_py.train.plan.stages.stage_costs import StageCosts
from entrenar_py.train.plan.stages.stage_workers import StageWorker
from entrenar_py.train.plan.units import size
from entrenar_py.train.service import address, config
from entrenar_py.train.stages import cut

_SECRET_BYTES = 32
_ROWS = (".jsonl", ".json", ".parquet")
_BANDWIDTH = 1e9  # any: no speed is known, so links take no time


@dataclass(frozen=True, kw_only=True)
class Answers:
    """All answers. `settings` have no stages yet, and paths as they were typed."""

    settings: Settings
    workers: tuple[StageWorker, ...]
    makes_secret: bool


def ask(questions: Questions, folder: Path) -> Answers:
    """Ask everything; relative paths start from `folder`. Raises UsageError if the input ends."""
    inside = _Paths(folder)
    settings = Settings(
        model=questions.ask("model: folder of the checkpoint", "model", inside.model),
        task=questions.ask(f"task: {', '.join(TASKS)}", "text", one_of(TASKS)),
        data=Data(train=questions.ask("data: rows to train on", "train.jsonl", inside.rows)),
        output=questions.ask("output: folder for what is trained", "out", inside.output),
        strategy=LAYER_PIPELINE,
    )
    if settings.task == "classify":
        labels = questions.ask("labels: all classes, in order", "no, yes", names(2))
        settings = replace(settings, classes=Classes(labels=labels))

    def adapted(answer: str) -> Settings:
        found = replace(settings, lora=Lora(targets=names(1)(answer)))
        model.shape(replace(found, model=folder / found.model))
        return found

    settings = questions.ask(
        "targets: ends of the names of the layers that get an adapter",
        ", ".join(settings.lora.targets),
        adapted,
    )
    num_blocks = len(blocks.of(model.shape(replace(settings, model=folder / settings.model))))
    count = questions.ask(
        f"workers: how many machines or devices, for {num_blocks} blocks",
        str(min(2, num_blocks)),
        number(1, num_blocks),
    )
    workers = tuple(_workers(questions, count))
    listen = questions.ask(
        "listen: where workers connect, host:port", Serving(secret_file=Path()).listen, _listen
    )
    secret, makes_secret = questions.ask(
        "secret_file: the shared secret; a file that is not there is made", "secret", inside.secret
    )
    settings = replace(settings, coordinator=Serving(secret_file=secret, listen=listen))
    return Answers(settings=settings, workers=workers, makes_secret=makes_secret)


def _workers(questions: Questions, count: int) -> Iterator[StageWorker]:
    """Ask for each worker."""
    taken = set[str]()

    def name(answer: str) -> str:
        if answer in taken:
            raise UsageError(f"{answer!r}: another worker has that name; use another one")
        return answer

    for index in range(count):
        own = questions.ask(f"worker {index + 1}: its name", f"worker-{index + 1}", name)
        taken.add(own)
        yield StageWorker(
            name=own,
            kind=questions.ask(f"{own}: its backend, {', '.join(KINDS)}", "cpu", one_of(KINDS)),
            memory=questions.ask(f"{own}: memory that is free there", "8GB", devices.size),
        )


class _Paths:
    """Reads answers that are paths, from a folder. They are kept as they were typed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, answer: str) -> Path:
        """Take a folder with a model's configuration."""
        model_folder.require_config(self._folder / answer)
        return Path(answer)

    def rows(self, answer: str) -> Path:
        """Take a file of rows, or a pattern of such."""
        path = self._folder / answer
        if not answer.endswith(_ROWS):
            raise UsageError(f"{answer}: use a file of one of these kinds: {', '.join(_ROWS)}")
        if "*" not in answer and not path.is_file():
            raise UsageError(f"{path}: no such file; give one with rows to train on")
        return Path(answer)

    def output(self, answer: str) -> Path:
        """Take a folder that is new or empty."""
        path = self._folder / answer
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path}: it is there, and not an empty folder; give a new one")
        return Path(answer)

    def secret(self, answer: str) -> tuple[Path, bool]:
        """Take a secret, or a path for a new one; return whether it is to be made."""
        path = self._folder / answer
        if path.exists():
            config.secret(path)
        elif not path.parent.is_dir():
            raise UsageError(f"{path}: the folder {path.parent} does not exist; create it first")
        return Path(answer), not path.exists()


def _listen(answer: str) -> str:
    address.parse(answer, port_min=0)
    return answer


def stages(answers: Answers, folder: Path) -> tuple[tuple[StagePlan, ...], str]:
    """Return the stages, and why they may not fit: then they are of equal size."""
    settings = replace(answers.settings, model=folder / answers.settings.model)
    run = planning.of(settings, [], longest=None, bandwidth=_BANDWIDTH)
    try:
        return planned.propose(StageCosts(run), answers.workers).plan(), ""
    except UsageError as error:
        parts = cut.equal(run.shape.num_blocks, len(answers.workers))
        found = tuple(
            replace(stage, worker=(one.name,), backend=one.kind)
            for stage, one in zip(parts, answers.workers, strict=True)
        )
        return found, str(error)


def lines(answers: Answers, cut_into: tuple[StagePlan, ...]) -> Iterator[str]:
    """Yield the commented configuration."""
    settings, serving = answers.settings, answers.settings.coordinator
    assert serving is not None, "it was asked for"
    scalar = plan_text.scalar
    yield "# A layer pipeline: each worker has some blocks of the model. All other keys are listed"
    yield "# by `entrenar finetune init`; relative paths start from this file's folder."
    yield f"model: {scalar(str(settings.model))}"
    yield f"task: {settings.task}"
    if settings.task == "classify":
        yield f"classes: {{labels: [{', '.join(map(scalar, settings.classes.labels))}]}}"
    yield f"output: {scalar(str(settings.output))}"
    yield f"strategy: {LAYER_PIPELINE}"
    yield f"data: {{train: {scalar(str(settings.data.train))}}}"
    yield f"lora: {{targets: [{', '.join(map(scalar, settings.lora.targets))}]}}"
    yield "# Rows of a step, and the shards that pass through the stages one by one: more of them"
    yield "# than stages leave less time idle."
    training = settings.training
    yield f"training: {{batch_size: {training.batch_size}, num_shards: {training.num_shards}}}"
    yield "# A stage has the blocks from the first number up to, and without, the second. Memory:"
    for worker in answers.workers:
        yield f"#   {worker.name}: {size(worker.memory or 0)} ({worker.kind})"
    yield from plan_text.section(cut_into)
    yield "# Each worker is started by"
    secret = serving.secret_file
    yield f"#   entrenar worker --coordinator HOST:PORT --secret-file {secret} --id NAME"
    yield "# with --backend where it is not the CPU, and a copy of the secret."
    yield "coordinator:"
    yield f"  listen: {scalar(serving.listen)}"
    yield f"  secret_file: {scalar(str(serving.secret_file))}"


def write_secret(path: Path) -> None:
    """Write a new secret to `path`, which only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
