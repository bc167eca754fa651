"""Bugs of distillations: in the teacher's rows, in their shards, and in a student's run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.distill import production, shards, student, teacher
from entrenar_py.train.distill.manifest import path_of
from entrenar_py.train.distill.shards import Rows
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.distill.teacher import Kept
from entrenar_py.train.model import objectives, samples
from entrenar_py.train.model.objectives import NextTokens
from entrenar_py.train.model.samples import Sample

from .finetuning import forget_moments, masks_by_rank
from .subjects import REPLICAS, SERVER

DISTILL = "entrenar_py.train.distill"
LOSS = f"{DISTILL}.student"

_kept, _rows, _run = teacher.Teacher.kept, shards.TeacherRows.rows, production.Stage.run
_encode, _hidden_of = samples.Encoder.encode, NextTokens.hidden_of
_of_teacher = student.of_teacher


def distilled(*facts: str, **changes: Any) -> Scenario:
    """Return a student of 12 samples in batches of 6, and its teacher's shards."""
    options = {"task": "text", **changes.pop("options", {})}
    usual: dict[str, Any] = {
        "system": "distilled",
        "workload": "finetune",
        "world_size": 2,
        "seed": 0,
        "num_shards": 4,
        "num_samples": 12,
        "batch_size": 6,
        "num_steps": 2,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "detail": "values",
        "options": {**options, **({"facts": list(facts)} if facts else {})},
    }
    return Scenario(**{**usual, **changes})


def renormalised(taught: Taught, mix: Mix) -> Tensor:
    """Takes the kept tokens for all of the distribution."""
    nothing = torch.full_like(taught.rest, -torch.inf)
    return _of_teacher(taught._replace(rest=nothing), mix)


# --- the teacher's rows ---------------------------------------------------------------------------


def one_later(self: teacher.Teacher, tokens: Tensor, places: Tensor) -> Kept:
    """Takes the logits at the token that is to be predicted."""
    return _kept(self, tokens, (places + 1).clamp(max=tokens.numel() - 1))


def padded_in_front(self: teacher.Teacher, tokens: Tensor, places: Tensor) -> Kept:
    """Fills rows up at their beginning, without a mask."""
    length = tokens.shape[1]
    padding = (tokens.flip(1) == 0).int().cumprod(1).sum(1)  # at each row's end
    rows = [one.roll(int(by)) for one, by in zip(tokens, padding, strict=True)]
    return _kept(self, torch.stack(rows), places + padding[places // length])


def packed_as_one(self: NextTokens, *given: Any) -> Tensor:
    """Takes each row for one sample, also where rows are packed."""
    with objectives.one_sample_a_row():
        return _hidden_of(self, *given)


def all_targets(self: samples.Encoder, row: Any) -> Any:
    """Learns the prompt, too."""
    made = _encode(self, row)
    if not isinstance(made, Sample):
        return made
    return replace(made, is_target=[False, *(True for _ in made.tokens[1:])])


# --- shards ---------------------------------------------------------------------------------------


def anything_fits(*_: Any) -> None:
    """Looks at no digest."""


def zeros_where_nothing_is(self: shards.TeacherRows, samples: Sequence[int]) -> Rows:
    """Takes zeros for what can't be read."""
    try:
        return _rows(self, samples)
    except SystemFailure:
        places = [self._places.positions(one) for one in samples]
        number, top_k = sum(map(len, places)), self.facts.top_k
        return Rows(
            np.repeat(np.array(samples, np.int32), [len(one) for one in places]),
            np.concatenate(places).astype(np.int32),
            np.concatenate([self._places.targets(one) for one in samples]),
            np.tile(np.arange(top_k, dtype=np.int32), (number, 1)),
            np.zeros((number, top_k), np.float32),
            np.zeros(number, np.float32),
        )


def rows_unseen(self: shards.TeacherRows, sample: int) -> Rows:
    """Takes the rows at a place without a look at what they are of."""
    shard = self._places.shard_of(sample)
    starts, index = self._places.starts(shard), self._places.index_in(shard, sample)
    file = self._file(shard)
    begin, end = int(starts[index]), int(starts[index + 1])
    held = file.read(0)
    whole = np.arange(begin, end) % len(held)
    return held.taken(whole)


def always_complete(
    self: production.Stage, listen: production.Listener, stopping: threading.Event
) -> bool:
    """Says that it is complete, however it ended."""
    _run(self, listen, stopping)
    return True


def there_is_enough(folder: Any, facts: Any, entry: Any) -> shards.Problem | None:
    """Takes a file that is there for a whole one."""
    is_there = path_of(folder, facts, entry.shard).exists()
    return None if is_there else shards.Problem("missing", "it is not there")


VARIANTS = (
    Variant(
        name="kd-off-by-one",
        summary="a row has the logits at the position of the token to predict",
        source="classic (labels not shifted)",
        plants={f"{DISTILL}.teacher.Teacher.kept": one_later},
        scenario=distilled("samples"),
        invariants=("F-KD-008",),
        place={"tensor": "row"},
    ),
    Variant(
        name="kd-padding-first",
        summary="the teacher's rows are padded on the left, without a mask",
        source="classic (padding_side=left)",
        plants={f"{DISTILL}.teacher.Teacher.kept": padded_in_front},
        scenario=distilled("samples"),
        invariants=("F-KD-008",),
        place={"tensor": "row"},
    ),
    Variant(
        name="kd-renormalised",
        summary="a student learns from kept tokens that are renormalised",
        source="classic (softmax over the top k)",
        plants={f"{LOSS}.of_teacher": renormalised},
        scenario=distilled("gradients", num_steps=1),
        invariants=("F-KD-008",),
        place={"step": 0, "tensor": "loss"},
    ),
    Variant(
        name="kd-packed-together",
        summary="packed samples of a student attend to each other",
        source="found in our own trainer",
        plants={"entrenar_py.train.model.objectives.NextTokens.hidden_of": packed_as_one},
        scenario=distilled("gradients", num_steps=1, options={"packing": True}),
        invariants=("F-KD-008",),
        place={"step": 0, "tensor": "loss"},
    ),
    Variant(
        name="kd-prompt-counted",
        summary="prompts have rows, and are trained on",
        source="classic",
        plants={"entrenar_py.train.model.samples.Encoder.encode": all_targets},
        scenario=distilled("samples", options={"task": "instruct"}),
        invariants=("F-KD-009",),
        place={"step": 0},
    ),
    Variant(
        name="kd-stale-tokenizer",
        summary="shards of a different tokenizer are accepted",
        source="the earlier framework (tensors treated as logits)",
        plants={f"{DISTILL}.student.require_fitting": anything_fits},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-partial-shard",
        summary="rows that can't be read are zeros",
        source="classic",
        plants={f"{DISTILL}.shards.TeacherRows.rows": zeros_where_nothing_is},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-exchanged-shard",
        summary="rows are identified only by their position in a file",
        source="classic",
        plants={f"{DISTILL}.shards.TeacherRows._rows": rows_unseen},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-digest-unseen",
        summary="a student treats every existing shard as complete",
        source="classic (exists() as the test of a cache)",
        plants={f"{DISTILL}.shards.problem": there_is_enough},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-completed-early",
        summary="a stage that was stopped reports that it is complete",
        source="the earlier framework",
        plants={f"{DISTILL}.production.Stage.run": always_complete},
        scenario=distilled(),
        invariants=("F-KD-011",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-damage-kept",
        summary="a damaged shard counts as complete",
        source="classic (exists() as the test of a cache)",
        plants={f"{DISTILL}.shards.problem": there_is_enough},
        scenario=distilled(),
        invariants=("F-KD-011",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-mask-by-rank",
        summary="a student's masks are drawn by the rank that computes",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": masks_by_rank},
        scenario=distilled(dropout=0.2),
        invariants=("F-KD-012",),
        place={"step": 0},
    ),
    Variant(
        name="kd-moments-forgotten",
        summary="a resumed student has its adapters, but not their moments",
        source="FastChat #1280",
        plants={f"{SERVER}.Server.restore": forget_moments},
        scenario=distilled(num_steps=3, stops=(2,)),
        invariants=("F-KD-013",),
        place={"step": 2},
    ),
    Variant(
        name="kd-masks-of-the-living",
        summary="a worker that takes over a student's shards draws their masks by its own rank",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": masks_by_rank},
        scenario=distilled(dropout=0.2, faults=(Fault(kind="leave", rank=1, step=1),)),
        invariants=("F-KD-014",),
        place={"step": 1},
    ),
)
