"""Bugs of distillations' losses, and scenarios to try bugs of distillations in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.distill import student, teacher
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.distill.teacher import Kept

DISTILL = "entrenar_py.train.distill"
LOSS = f"{DISTILL}.student"

_divergence, _of_teacher = student.divergence, student.of_teacher
_loss_and_gradient, _kept_of = student._loss_and_gradient, teacher.kept_of


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
)
