"""A run of `entrenar finetune`: its rows as tokens, its workload, and its plan.

A run goes through three records. `Settings` say what the user wants, `Prepared` has the rows as
tokens and the tokenizer, and a workload (`workload.Finetuning`) also has the model. `entrenar plan`
and a teacher's shards need only `Prepared`, and no weights, so the last two are separate.

`plan_of` describes a run in the terms of the reference trainer. The plan has everything that
decides the bits of the result, including digests of checkpoint and rows. So a resumed run is
refused if anything differs, and a ledger says what was trained.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.model import model, model_folder, precision, rendering, samples
from entrenar_py.train.model.preference import DirectPreference
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import AUTO, CHATS, COMPILABLE, CUDNN, TORCH, Lora, Settings
from entrenar_py.train.model.workload import Finetuning, Tuned

TRAINER = "parameter_server"
LEDGER = "ledger.jsonl"  # in the output folder; its first line has the run's plan
_FIRST_LINE_BYTES = 2**20
_MODEL = "model"
_ALWAYS = ("rank", "alpha", "dropout")  # of adapters; older checkpoints have no other keys


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tokenizer, the samples to train and to evaluate on, and each class's weight.

    `class_counts` are the numbers of training rows of each class, before rare ones are repeated.
    """

    settings: Settings
    tokenizer: Any
    train: Samples
    validation: Samples | None
    class_weights: tuple[float, ...]
    class_counts: tuple[int, ...] = ()

    @property
    def pad_token(self) -> int:
        """The token with which rows are padded."""
        return model.padding(self.tokenizer)

    @property
    def day(self) -> str | None:
        """The date that the chat template receives; None if it has no clock."""
        return self.settings.data.date if rendering.has_clock(self.tokenizer) else None

    def workload(self, kind: type[Finetuning] | None = None, **more: Any) -> Finetuning:
        """Return a workload of class `kind` with the model and its samples; loads the checkpoint.

        By default, the task determines the class. `more` are further arguments of `kind`. Raises
        UsageError if the checkpoint is not complete, or if tokenizer, rows or settings don't fit
        it.
        """
        module = model.load(self.settings, self.pad_token)
        both = (self.train, self.validation)
        model_folder.require_samples(self.settings, module, both, self.pad_token)
        model_folder.require_own_loss(self.settings, module)
        weights = self.class_weights
        return (kind or kind_of(self.settings))(
            module,
            self.train,
            pad_token=self.pad_token,
            class_weights=weights,
            products=precision.of_products(self.settings),
            packed_tokens=self.settings.data.max_tokens if self.settings.data.packing else None,
            compiles=compiles(self.settings, len(self.train)),
            by_cudnn=self.settings.attention == CUDNN,
            **options_of(self.settings),
            **more,
        )


PASSES_LEAST = 1000  # of a run's shards: compiling takes what these gain, at 50 ms each


def compiles(settings: Settings, num_samples: int) -> bool:
    """Return whether a run on `num_samples` rows compiles its blocks where a device can.

    `compile: auto` decides by the shards of the whole run, not by those that are left, and not by
    the number of workers: kernels decide bits, which resuming and workers must not change.
    """
    if settings.recompute != "none" or settings.strategy not in (None, *COMPILABLE):
        return False
    if settings.compile == AUTO:
        return num_passes(settings, num_samples) >= PASSES_LEAST
    return bool(settings.compile)


def compilation(settings: Settings, num_samples: int | None) -> str:
    """Return in words whether a run compiles its blocks on CUDA, and why.

    `num_samples` is None if the rows are not known.
    """
    if settings.recompute != "none":
        return f"no, with recompute: {settings.recompute}"
    if settings.strategy not in (None, *COMPILABLE):
        return f"no, with strategy: {settings.strategy}"
    if settings.compile != AUTO:
        return "on CUDA, without dropout" if settings.compile else "no"
    if num_samples is None:
        return f"auto: on CUDA, if all steps have {PASSES_LEAST:,} shards or more"
    number = num_passes(settings, num_samples)
    where = "on CUDA, without dropout" if compiles(settings, num_samples) else "no"
    return f"auto: {where}: all steps have {number:,} shards (worth it from {PASSES_LEAST:,} on)"


def num_passes(settings: Settings, num_samples: int) -> int:
    """Return the number of shards in all steps of a run."""
    return settings.training.num_steps(num_samples) * settings.training.num_shards


def kind_of(settings: Settings) -> type[Finetuning]:
    """Return the class of the workload of a run's task."""
    return DirectPreference if settings.task == "preference" else Finetuning


def options_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments that only the workload of a run's task has."""
    return {"preference": settings.preference} if settings.task == "preference" else {}


def prepare(
    settings: Settings,
    cache_folder: Path | None = None,
    *,
    needs_weights: bool = True,
    day: str | None = None,
) -> Prepared:
    """Read and tokenise all rows, with a cache in `cache_folder` (by default the user's).

    With `needs_weights`, all files of the checkpoint must exist, though none is read. `day` is the
    run's day, by default the result of `day_of`. Raises UsageError for a file or a row that can't
    be used.
    """
    if needs_weights:
        model_folder.require_checkpoint(settings.model)
        if (start := settings.lora.start_from) is not None and settings.adapts:
            model_folder.require_adapters(start, f"lora.start_from={start}")
    tokenizer, kept = model.tokenizer(settings), cache_folder or cache()
    settings = dated(settings, tokenizer, day)
    data = settings.data
    train = samples.load(settings, data.train, tokenizer, cache=kept)
    validation = None
    if data.validation is not None:
        validation = samples.load(settings, data.validation, tokenizer, cache=kept)
    elif data.validation_share:
        rng = seeds(settings.seed).rng("validation")
        total = len(train)
        train, validation = samples.split(train, data.validation_share, rng)
        if not (len(train) and len(validation)):
            raise UsageError(
                f"data.validation_share={data.validation_share:g}: that leaves {len(train)} "
                f"of {total} rows to train on and {len(validation)} to evaluate on; use "
                "another share"
            )
    weights: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    if settings.task == "classify":
        counts = samples.class_counts(train, settings.classes.labels)
        if settings.classes.oversample:
            asked = "classes.oversample=true"
            samples.require_rows(counts, settings.classes.labels, asked, "use false")
            train = samples.oversampled(train)
        weights = samples.class_weights(train, settings.classes.weights, settings.classes.labels)
    return Prepared(
        settings=settings,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        class_weights=weights,
        class_counts=counts,
    )


def day_of(settings: Settings) -> str:
    """Return the day of the run that began the ledger in the output folder, else today."""
    try:
        with files.open_file(settings.output / LEDGER) as file:
            head = json_text.load(file.readline(_FIRST_LINE_BYTES))
        plan = head["plan"] if "plan" in head else head["scenario"]  # from an earlier release
        day = plan["options"].get("data.date")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        day = None  # a problem of the ledger is reported when the run resumes from it
    return day if isinstance(day, str) else datetime.now().astimezone().date().isoformat()


def dated(settings: Settings, tokenizer: Any, day: str | None) -> Settings:
    """Return settings with the day that the chat template receives, if it has a clock.

    A run keeps its day, however often it is resumed. Raises UsageError for a text that is not a
    date.
    """
    if settings.data.date is not None:
        day = settings.data.date
    elif settings.task not in CHATS or not rendering.has_clock(tokenizer):
        return settings
    else:
        day = day or day_of(settings)
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise UsageError(f"data.date={day!r}: is not a date; use one such as 2026-11-28") from error
    return replace(settings, data=replace(settings.data, date=day))


def cache() -> Path:
    """Return the user's folder for files that can be created again, such as tokenised rows."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "entrenar-py"


def plan_of(settings: Settings, workload: Tuned) -> TrainingPlan:
    """Return the plan of the reference trainer for `settings`.

    Raises UsageError if `lora.start_from` has adapters of a different model.
    """
    training = settings.training
    batch_size = min(training.batch_size, workload.num_samples)
    num_steps = training.num_steps(workload.num_samples)
    return seeds(settings.seed).with_(
        world_size=settings.num_workers,
        num_samples=workload.num_samples,
        batch_size=batch_size,
        num_shards=training.num_shards,
        num_steps=num_steps,
        optimizer="adamw",
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_norm,
        schedule=training.schedule,
        warmup_steps=round(training.warmup_share * num_steps),
        options=_decisive(settings, workload),
    )


def model_digest(run: TrainingPlan) -> str:
    """Return the digest of the checkpoint that the run `run` started from."""
    return str(run.options[_MODEL])


def _decisive(settings: Settings, workload: Tuned) -> dict[str, Any]:
    """Return the other facts that decide what a run learns; they must stay the same on resuming."""
    data, lora, classes = settings.data, settings.lora, settings.classes
    decisive: dict[str, Any] = {
        _MODEL: model_folder.digest(settings.model),
        "rows": workload.data_digest,
        "task": settings.task,
        "method": settings.method,
        "precision": settings.precision,
        "data.packing": data.max_tokens if data.packing else False,
    }
    if settings.task == "classify":
        decisive |= {"classes.labels": list(classes.labels), "classes.weights": classes.weights}
    decisive |= workload.decisive
    if settings.attention != TORCH:
        decisive["attention"] = settings.attention
    if data.date is not None:
        decisive["data.date"] = data.date
    if settings.adapts:
        decisive |= {
            f"lora.{name}": value
            for name, value in asdict(lora).items()
            if name in _ALWAYS or value != getattr(Lora, name)
        }
        decisive["lora.targets"] = list(lora.targets)
        if lora.start_from is not None:
            model_folder.require_base(lora.start_from, settings.model, decisive[_MODEL])
            decisive["lora.start_from"] = model_folder.adapters_digest(lora.start_from)
    return decisive


def seeds(seed: int) -> TrainingPlan:
    """Return the source of random numbers of a run with `seed`."""
    return TrainingPlan(trainer=TRAINER, workload=Finetuning.name, world_size=1, seed=seed)
