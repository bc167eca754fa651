"""Bugs of distillations: in the loss, in the teacher's rows, and in the shards that hold them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.distill import loss, producing, reading, teacher
from entrenar_py.distill.loss import Mix, Taught
from entrenar_py.distill.manifest import path_of
from entrenar_py.distill.shards import Rows
from entrenar_py.distill.teacher import Kept
from entrenar_py.errors import SystemFailure
from entrenar_py.faults import Fault
from entrenar_py.mutants import Variant
from entrenar_py.scenario import Scenario
from entrenar_py.tuning import encoding
from entrenar_py.tuning.encoding import Sample

from .finetuning import forget_moments, masks_by_rank
from .subjects import REPLICAS, SERVER

DISTILL = "entrenar_py.distill"
LOSS = f"{DISTILL}.loss"

_divergence, _of_teacher = loss.divergence, loss.of_teacher
_loss_and_gradient, _kept_of = loss._loss_and_gradient, teacher.kept_of
_kept, _rows, _run = teacher.Teacher.kept, reading.TeacherRows.rows, producing.Stage.run
_encode = encoding.Encoder.encode


def soft(**options: Any) -> Scenario:
    """Return rows of logits to compute the loss of."""
    return Scenario(system="soft_targets", workload="linear", world_size=1, seed=0, options=options)


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


# --- the loss -------------------------------------------------------------------------------------


def negated(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Subtracts the wrong way round."""
    return -_divergence(wanted, found, temperature)


def not_normalised(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Divides log-probabilities by T, and takes them for log-probabilities."""
    shares = (wanted / temperature).exp()
    return temperature**2 * (shares * (wanted - found) / temperature).nan_to_num().sum(-1)


def exchanged(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Takes the teacher for the student."""
    return _divergence(found, wanted, temperature)


def without_square(wanted: Tensor, found: Tensor, temperature: float) -> Tensor:
    """Leaves T^2 out."""
    return _divergence(wanted, found, temperature) / temperature**2


def renormalised(taught: Taught, mix: Mix) -> Tensor:
    """Takes the kept tokens for all of the distribution."""
    nothing = torch.full_like(taught.rest, -torch.inf)
    return _of_teacher(taught._replace(rest=nothing), mix)


def entropy_at_temperature(
    logits: Tensor, targets: Tensor, tokens: Tensor, taught: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Softens the cross entropy, too."""
    picked = targets[:, None].clamp(min=0)
    apart = [
        -one.log_softmax(-1).gather(1, picked).sum() for one in (logits / mix.temperature, logits)
    ]
    found, gradient = _loss_and_gradient(logits, targets, tokens, taught, mix)
    return found + (1 - mix.alpha) * (apart[0] - apart[1]), gradient


def gradient_over_square(
    logits: Tensor, targets: Tensor, tokens: Tensor, taught: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Multiplies the loss by T^2, and not its gradient."""
    found, gradient = _loss_and_gradient(logits, targets, tokens, taught, mix)
    return found, gradient / mix.temperature**2


def rest_is_constant(
    logits: Tensor, targets: Tensor, tokens: Tensor, taught: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """Passes no gradient to tokens that are not kept."""
    found, gradient = _loss_and_gradient(logits, targets, tokens, taught, mix)
    is_kept = torch.zeros_like(gradient).scatter(1, tokens, 1.0)
    return found, gradient * is_kept


def unlikely_half_cut(logits: Tensor, *, top_k: int, known: int, stored: torch.dtype) -> Kept:
    """Cuts off the less likely half of a whole distribution."""
    kept = _kept_of(logits, top_k=top_k, known=known, stored=stored)
    middle = kept.log_probabilities.median(-1, keepdim=True).values
    cut = torch.where(kept.log_probabilities < middle, -40.0, kept.log_probabilities)
    return Kept(kept.tokens, cut, kept.rest)


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


def all_targets(self: encoding.Encoder, row: Any) -> Any:
    """Learns the prompt, too."""
    made = _encode(self, row)
    if not isinstance(made, Sample):
        return made
    return replace(made, is_target=[False, *(True for _ in made.tokens[1:])])


# --- shards ---------------------------------------------------------------------------------------


def anything_fits(*_: Any) -> None:
    """Looks at no digest."""


def zeros_where_nothing_is(self: reading.TeacherRows, samples: Sequence[int]) -> Rows:
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


def rows_unseen(self: reading.TeacherRows, sample: int) -> Rows:
    """Takes the rows at a place without a look at what they are of."""
    shard = self._places.shard_of(sample)
    starts, index = self._places.starts(shard), self._places.index_in(shard, sample)
    file = self._file(shard)
    begin, end = int(starts[index]), int(starts[index + 1])
    held = file.read(0)
    whole = np.arange(begin, end) % len(held)
    return held.taken(whole)


def always_complete(
    self: producing.Stage, listen: producing.Listener, stopping: threading.Event
) -> bool:
    """Says that it is complete, however it ended."""
    _run(self, listen, stopping)
    return True


def there_is_enough(folder: Any, facts: Any, entry: Any) -> str:
    """Takes a file that is there for a whole one."""
    return "" if path_of(folder, facts, entry.shard).exists() else "it is not there"


def rest_by_difference(logits: Tensor, *, top_k: int, known: int, stored: torch.dtype) -> Kept:
    """Takes for the rest what the kept tokens leave of 1."""
    kept = _kept_of(logits, top_k=top_k, known=known, stored=stored)
    left = 1 - kept.log_probabilities.double().exp().sum(-1)
    return Kept(kept.tokens, kept.log_probabilities, left.clamp(min=0).log().float())


VARIANTS = (
    Variant(
        name="kd-sign",
        summary="the divergence has the other sign",
        source="classic",
        plants={f"{LOSS}.divergence": negated},
        scenario=soft(alpha=1.0, temperatures=[2.0], pairs=200),
        invariants=("F-KD-001",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-rest-by-difference",
        summary="the mass of the rest is 1 less the sum of the kept, which rounding decides",
        source="found in our own trainer",
        plants={f"{DISTILL}.teacher.kept_of": rest_by_difference},
        scenario=soft(alpha=1.0, alike=True, spread=8.0, temperatures=[2.0, 4.0, 10.0]),
        invariants=("F-KD-001",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-not-normalised",
        summary="softened log-probabilities are not normalised again",
        source="classic",
        plants={f"{LOSS}.divergence": not_normalised},
        scenario=soft(alpha=1.0, temperatures=[2.0], pairs=200),
        invariants=("F-KD-003",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-entropy-at-t",
        summary="the cross entropy is softened, too",
        source="classic",
        plants={f"{LOSS}._loss_and_gradient": entropy_at_temperature},
        scenario=soft(alpha=0.0, temperatures=[3.0]),
        invariants=("F-KD-002",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-swapped",
        summary="teacher and student are exchanged in the divergence",
        source="classic (the order of kl_div's arguments)",
        plants={f"{LOSS}.divergence": exchanged},
        scenario=soft(alpha=1.0, temperatures=[1.0, 4.0]),
        invariants=("F-KD-003",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-no-square",
        summary="the divergence is not multiplied by T^2",
        source="classic",
        plants={f"{LOSS}.divergence": without_square},
        scenario=soft(alpha=1.0, temperatures=[1.0, 4.0]),
        invariants=("F-KD-003",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-rest-forgotten",
        summary="the kept tokens are renormalised, and the rest is forgotten",
        source="classic (softmax over the top k)",
        plants={f"{LOSS}.of_teacher": renormalised},
        scenario=soft(alpha=1.0, temperatures=[1.0, 4.0]),
        invariants=("F-KD-003",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-gradient-over-square",
        summary="the loss has T^2, and its gradient doesn't",
        source="classic",
        plants={f"{LOSS}._loss_and_gradient": gradient_over_square},
        scenario=soft(alpha=1.0, top_k=24, temperatures=[1.0, 10.0, 1000.0], spread=0.2),
        invariants=("F-KD-004", "F-KD-006"),
        place={"element": 0},
    ),
    Variant(
        name="kd-rest-without-gradient",
        summary="tokens that are not kept get no gradient",
        source="classic",
        plants={f"{LOSS}._loss_and_gradient": rest_is_constant},
        scenario=soft(alpha=1.0, pairs=20, temperatures=[1.0]),
        invariants=("F-KD-005",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-half-kept",
        summary="the less likely half of a whole distribution is cut off",
        source="classic (top-p before the teacher's logits are stored)",
        plants={f"{DISTILL}.teacher.kept_of": unlikely_half_cut},
        scenario=soft(alpha=1.0, top_k=24),
        invariants=("F-KD-007",),
        place={"tensor": "loss"},
    ),
    Variant(
        name="kd-off-by-one",
        summary="a row has the logits at the token that is to be predicted",
        source="classic (labels not shifted)",
        plants={f"{DISTILL}.teacher.Teacher.kept": one_later},
        scenario=distilled("samples"),
        invariants=("F-KD-008",),
        place={"tensor": "row"},
    ),
    Variant(
        name="kd-padding-first",
        summary="the teacher's rows are filled up at their beginning, without a mask",
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
        name="kd-prompt-counted",
        summary="prompts have rows, and are learned",
        source="classic",
        plants={"entrenar_py.tuning.encoding.Encoder.encode": all_targets},
        scenario=distilled("samples", options={"task": "instruct"}),
        invariants=("F-KD-009",),
        place={"step": 0},
    ),
    Variant(
        name="kd-stale-tokenizer",
        summary="shards of another tokenizer are taken",
        source="the earlier framework (tensors taken for logits)",
        plants={f"{DISTILL}.student.require_fitting": anything_fits},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-partial-shard",
        summary="rows that can't be read are zeros",
        source="classic",
        plants={f"{DISTILL}.reading.TeacherRows.rows": zeros_where_nothing_is},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-exchanged-shard",
        summary="rows are taken by their place in a file alone",
        source="classic",
        plants={f"{DISTILL}.reading.TeacherRows._rows": rows_unseen},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-digest-unseen",
        summary="a student takes a shard that is there for a whole one",
        source="classic (exists() as the test of a cache)",
        plants={f"{DISTILL}.shards.problem": there_is_enough},
        scenario=distilled("refusals"),
        invariants=("F-KD-010",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-completed-early",
        summary="a stage that was stopped says that it is complete",
        source="the earlier framework",
        plants={f"{DISTILL}.producing.Stage.run": always_complete},
        scenario=distilled(),
        invariants=("F-KD-011",),
        place={"tensor": "shard"},
    ),
    Variant(
        name="kd-damage-kept",
        summary="a damaged shard counts as made",
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
        summary="a resumed student has its adapters, and none of their moments",
        source="FastChat #1280",
        plants={f"{SERVER}.Server.restore": forget_moments},
        scenario=distilled(num_steps=3, stops=(2,)),
        invariants=("F-KD-013",),
        place={"step": 2},
    ),
    Variant(
        name="kd-masks-of-the-living",
        summary="a worker that takes a student's shards over draws their masks by its own rank",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": masks_by_rank},
        scenario=distilled(dropout=0.2, faults=(Fault(kind="leave", rank=1, step=1),)),
        invariants=("F-KD-014",),
        place={"step": 1},
    ),
)
