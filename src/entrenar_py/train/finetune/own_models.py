"""`entrenar coordinator` with a model of the trainer's own (`workload`), for tests and benchmarks.

The file is read like a fine-tuning configuration, and has the same section `coordinator`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from entrenar_py.shared import systems, workers
from entrenar_py.shared.config.composer import MapNode
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import CHOICES, OF_USERS, TrainingPlan
from entrenar_py.train.coordinator import topology
from entrenar_py.train.finetune import serving, settings_file
from entrenar_py.train.model.settings import Key, Serving
from entrenar_py.train.service import coordinator
from entrenar_py.train.service.config import Checkpoint, Config
from entrenar_py.train.service.coordinator import Task

WORKLOADS = tuple(name for name in CHOICES["workload"] if name not in OF_USERS)
SIZED = ("mlp", "vectors")  # workloads with a variable `width`


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """The configuration of a run. The fields that TrainingPlan has, too, come first."""

    workload: Annotated[
        str,
        Key(
            "the model and its data; the gradients of `vectors` are known beforehand",
            choices=WORKLOADS,
        ),
    ]
    world_size: Annotated[int, Key("largest number of workers at a time", least=1)]
    seed: Annotated[int, Key("the only source of randomness", least=0)]
    num_shards: Annotated[
        int, Key("logical shards of a batch, at least one per worker", least=1, most=2**16)
    ] = TrainingPlan.num_shards
    num_samples: Annotated[
        int, Key("size of the data set, at least one sample per worker", least=1)
    ] = TrainingPlan.num_samples
    batch_size: Annotated[
        int, Key("samples of one step, over all workers; an epoch's last batch is short", least=1)
    ] = TrainingPlan.batch_size
    num_steps: Annotated[int, Key("optimizer steps", least=1)] = TrainingPlan.num_steps
    accumulation: Annotated[int, Key("micro-batches of a shard", least=1, most=2**16)] = (
        TrainingPlan.accumulation
    )
    optimizer: Annotated[
        str,
        Key("the update rule; `momentum` is `sgd` with 0.9", choices=tuple(CHOICES["optimizer"])),
    ] = TrainingPlan.optimizer
    learning_rate: Annotated[float, Key("the highest rate", least=0)] = TrainingPlan.learning_rate
    weight_decay: Annotated[
        float, Key("decay per step; decoupled from the gradient in `adamw`", least=0)
    ] = TrainingPlan.weight_decay
    clip_norm: Annotated[
        float | None, Key("largest L2 norm of the averaged gradient; null: no clipping", above=0)
    ] = TrainingPlan.clip_norm
    schedule: Annotated[
        str,
        Key(
            "the rate after the warm-up: constant, or falling to 0 at `num_steps`",
            choices=tuple(CHOICES["schedule"]),
        ),
    ] = TrainingPlan.schedule
    warmup_steps: Annotated[
        int, Key("steps in which the rate rises to `learning_rate`", least=0)
    ] = TrainingPlan.warmup_steps
    dropout: Annotated[float, Key("probability, below 1", least=0, below=1)] = TrainingPlan.dropout
    width: Annotated[int, Key("hidden width of `mlp`; elements of `vectors`", least=1)] = (
        TrainingPlan.width
    )
    updates: Annotated[
        str,
        Key(
            "what takes the steps: every worker, or the server, which then sends the new weights",
            choices=("workers", workers.SERVER),
        ),
    ] = "workers"
    checkpoint: Annotated[
        Checkpoint | None, Key("where the state is saved, for `--resume`; by default nowhere")
    ] = None
    metrics: Annotated[Path | None, Key("a file with one JSON object for each step")] = None
    ledger: Annotated[
        Path | None, Key("the trace of the run, with one chained line for each event")
    ] = None
    coordinator: Annotated[Serving, Key("where and how workers connect")]


def run(
    path: Path, *, resume: bool, halt_on_spike: bool = False, tensorboard: Path | None = None
) -> int:
    """Serve the run that the file at `path` describes; return the exit code.

    Raises as `serving.run` does.
    """
    settings = load(path)
    systems.require_possible(settings.plan)
    serving.require_star(topology.of(settings.plan), halt_on_spike=halt_on_spike)
    task = Task(halt_on_spike=halt_on_spike, tensorboard=tensorboard)
    return coordinator.serve(settings, task, resume=resume)


def load(path: Path) -> Config:
    """Return the configuration at `path`. Relative paths in it start from its folder.

    Raises ContractError with all problems at once, each as `file:line:column: error: ...`.
    """
    problems = Problems()
    root = settings_file.read(path, problems)
    own = None if root is None else settings_file.section(OwnRun, root, path.parent, problems)
    if own is None or root is None:
        problems.settle(strict=True)
    assert own is not None, "what can't be read is a problem"
    assert root is not None, "what can't be read is a problem"
    plan = _plan(own, root, problems)
    service = serving.connected(
        own.coordinator, root, problems, num_workers=own.world_size, key="world_size"
    )
    problems.settle(strict=True)
    assert plan is not None, "what can't be read is a problem"
    assert service is not None, "what can't be read is a problem"
    saves = own.checkpoint
    return service.configured(
        plan,
        checkpoint=saves and replace(saves, path=_target(saves.path)),
        metrics=own.metrics,
        ledger=own.ledger,
    )


def _plan(own: OwnRun, root: MapNode, problems: Problems) -> TrainingPlan | None:
    """Return the plan; None after reporting values that exclude each other."""

    def refuse(key: str, message: str) -> None:
        problems.error(settings_file.innermost(root, (key,)).at, message)

    known = {field.name for field in fields(TrainingPlan)}
    values: dict[str, Any] = {
        field.name: getattr(own, field.name) for field in fields(OwnRun) if field.name in known
    }
    kind = topology.BY_NAME[own.coordinator.topology]
    options = dict[str, Any]()
    if own.coordinator.audit_share:
        options["audit_share"] = own.coordinator.audit_share
    if kind is topology.STAR and workers.OPTION in root.fields:
        options[workers.OPTION] = own.updates
    elif own.updates == workers.SERVER:
        refuse(
            workers.OPTION,
            f"updates={own.updates!r} with topology: mesh: no gradient passes the coordinator "
            "there; leave it out, or use topology: star",
        )
    if "width" in root.fields and own.workload not in SIZED:
        sized = " or ".join(SIZED)
        refuse(
            "width",
            f"width={own.width}: {own.workload} has one size; leave it out, or use {sized}",
        )
    try:
        return TrainingPlan(**values, trainer=kind.trainer, options=options)
    except UsageError as error:
        refuse(error.field, str(error))
        return None


def _target(path: Path) -> Path:
    """Return the target of a link, which is written and locked: a rename would replace the link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
