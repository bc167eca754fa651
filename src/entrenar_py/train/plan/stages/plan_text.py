"""A plan of stages as text, as `stages:` of a configuration, and as JSON can hold it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from entrenar_py.shared.wording import counted
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.plan.shape import FLOAT_BYTES
from entrenar_py.train.plan.stages.planned import PlannedStage, StagesPlan
from entrenar_py.train.plan.stages.stage_costs import Terms
from entrenar_py.train.plan.text import COLUMNS, columns
from entrenar_py.train.plan.units import seconds, short, size

SCHEMA = "entrenar-pipeline-plan/1"
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_HEAD = (
    *("stage", "blocks", "worker", "on", "needs", "there", "a shard"),
    *("a shard, on", "a step, up", "down"),
)
_TERMS = ("weights", "trained", "gradients", "arriving", "kept", "hidden", "passing", "runtime")


def lines(plan: StagesPlan, *, length_from: str) -> Iterator[str]:
    """Yield the model, each stage, and what a step takes."""
    costs, run = plan.costs, plan.costs.run
    counts, training = run.shape.counts(), run.settings.training
    yield (
        f"model    {run.shape.config.model_type}: {run.shape.num_parameters:,} parameters, "
        f"{costs.num_blocks} blocks"
    )
    yield (
        f"trained  {counts.trained:,} by {run.settings.method}, "
        f"{size(FLOAT_BYTES * counts.trained)} a gradient"
    )
    yield (
        f"step     {training.batch_size} rows in {costs.num_shards} shards of {run.rows} x "
        f"{run.length} tokens ({length_from})"
    )
    yield ""
    yield "stages: memory of a worker, time of a shard, bytes on the wire"
    yield from columns(_HEAD, list(_rows(plan)))
    yield ""
    yield "bytes of a worker, term by term"
    yield from columns(("stage", *_TERMS), list(_term_rows(plan)))
    yield ""
    yield from _step(plan)


def section(stages: Sequence[StagePlan]) -> Iterator[str]:
    """Yield the lines of `stages:` in a configuration, to be pasted."""
    yield "stages:"
    for stage in stages:
        parts = [f"layers: [{stage.layers[0]}, {stage.layers[1]}]"]
        names = [scalar(name) for name in stage.worker]
        if names:
            listed = f"[{', '.join(names)}]"
            parts.append(f"worker: {names[0] if len(names) == 1 else listed}")
        if stage.backend:
            parts.append(f"backend: {stage.backend}")
        yield f"- {{{', '.join(parts)}}}"


def scalar(text: str) -> str:
    """Return `text` as YAML reads it back, in quotes where it needs them."""
    is_plain = _PLAIN.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def to_record(plan: StagesPlan) -> dict[str, Any]:
    """Return a plan as JSON can hold it. Sizes are in bytes; times in seconds, or null."""
    costs = plan.costs
    return {
        "schema": SCHEMA,
        "blocks": costs.num_blocks,
        "shards": costs.num_shards,
        "shard": {"rows": costs.run.rows, "tokens": costs.run.length},
        "stages": [_stage_record(stage, has_speed=plan.has_speed) for stage in plan.stages],
        "bubble": plan.bubble,
        "step_seconds": plan.step_seconds,
        "coordinator_bytes": int(costs.coordinator_bytes),
    }


def _stage_record(stage: PlannedStage, *, has_speed: bool) -> dict[str, Any]:
    return {
        "layers": [stage.blocks.start, stage.blocks.stop],
        "workers": [
            {
                "worker": worker.name or None,
                "backend": worker.kind,
                "memory_bytes": worker.memory,
                "needed_bytes": int(terms.needed),
                "needs": {term: int(getattr(terms, term)) for term in _TERMS},
            }
            for worker, terms in zip(stage.workers, stage.terms, strict=True)
        ],
        "shard_seconds": stage.seconds if has_speed else None,
        "hidden_bytes": stage.hidden_bytes,
        "sent_bytes": stage.sent_bytes,
        "received_bytes": stage.received_bytes,
    }


def _rows(plan: StagesPlan) -> Iterator[tuple[str, ...]]:
    for index, stage in enumerate(plan.stages):
        time = seconds(stage.seconds) if plan.has_speed else f"{stage.seconds:.2f} blocks"
        for number, (worker, terms) in enumerate(zip(stage.workers, stage.terms, strict=True)):
            moved: tuple[str, ...] = (time, *map(_moved, _traffic(stage)))
            yield (
                str(index),
                f"{stage.blocks.start}-{stage.blocks.stop - 1}",
                worker.name[:20] or "any",
                worker.kind,
                size(terms.needed),
                "?" if worker.memory is None else size(worker.memory),
                *(moved if not number else ("",) * len(moved)),
            )


def _traffic(stage: PlannedStage) -> tuple[int, int, int]:
    return stage.hidden_bytes, stage.sent_bytes, stage.received_bytes


def _moved(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else "-"


def _term_rows(plan: StagesPlan) -> Iterator[tuple[str, ...]]:
    for index, stage in enumerate(plan.stages):
        kinds = dict[str, Terms]()
        for worker, terms in zip(stage.workers, stage.terms, strict=True):
            kinds.setdefault(worker.kind, terms)
        for kind, terms in kinds.items():
            name = str(index) if len(kinds) == 1 else f"{index} {kind}"
            yield (name, *(short(getattr(terms, term)) for term in _TERMS))


def _step(plan: StagesPlan) -> Iterator[str]:
    """Yield what a step takes, and of what that is the sum."""
    num_shards, num_stages = plan.costs.num_shards, len(plan.stages)
    if plan.step_seconds is None:
        told = (
            f"time     no speed is known (flops or seconds_per_block of workers): they are taken "
            f"to be alike, and links to take no time. The slowest stage takes {plan.slowest:.2f} "
            "blocks a shard."
        )
    else:
        told = (
            f"time     a step takes {seconds(plan.step_seconds)}: a shard through all stages, "
            f"{num_shards - 1} more behind the slowest stage ({seconds(plan.slowest)} each), and "
            f"gradients and weights over the coordinator's link ({size(plan.costs.run.bandwidth)}"
            "/s)"
        )
    yield from textwrap.wrap(told, COLUMNS, subsequent_indent=" " * 9)
    yield (
        f"bubble   {100 * plan.bubble:.0f} % of a step is idle: {counted(num_stages, 'stage')} and "
        f"{counted(num_shards, 'shard')}, (P - 1) / (S + P - 1)"
    )
    yield f"coordinator needs {size(plan.costs.coordinator_bytes)}"
