"""Correct distillations that are not ours: no check may report any of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.distill import student
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.distill.teacher import Kept
from entrenar_py.train.model.samples import Samples

from .distillation import DISTILL, LOSS, distilled

_forward = student.StudentObjective.forward


def one_by_one(hidden: Tensor, weight: Tensor, taught: Taught, mix: Mix) -> Tensor:
    """Lets autograd find the gradient, position by position."""
    logits, parts = hidden @ weight.t(), []
    for n in range(len(logits)):
        one = slice(n, n + 1)
        parts.append(student.of_logits(logits[one], Taught(*(part[one] for part in taught)), mix))
    return torch.stack(parts).sum()


def in_order(samples: Samples, ids: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Runs the teacher on a sample at a time, in the shard's order."""
    for one in ids:
        yield [one]


def in_double(logits: Tensor, *, top_k: int, known: int, stored: torch.dtype) -> Kept:
    """Sorts all log-probabilities, in float64."""
    logs = logits.double().log_softmax(-1)
    tokens = logs[:, :known].sort(-1, descending=True).indices[:, :top_k]
    rest = logs.scatter(1, tokens, -torch.inf).logsumexp(-1)
    return Kept(tokens.int(), logs.gather(1, tokens).to(stored), rest.float())


VARIANTS = (
    Variant(
        name="kd-autograd-in-training",
        summary="positions are computed one by one",
        plants={f"{LOSS}.of_hidden": one_by_one},
        scenario=distilled("samples", "gradients"),
        tried=("F-KD-008", "F-KD-009"),
    ),
    Variant(
        name="kd-batches-of-one",
        summary="the teacher sees a sample at a time, and its log-probabilities are in float64",
        plants={f"{DISTILL}.teacher.batches": in_order, f"{DISTILL}.teacher.kept_of": in_double},
        scenario=distilled("samples", "gradients", "refusals"),
        tried=("F-KD-008", "F-KD-009", "F-KD-010", "F-KD-011"),
    ),
    Variant(
        name="kd-three-workers",
        summary="a student has three workers, and the teacher sees a sample at a time",
        plants={f"{DISTILL}.teacher.batches": in_order},
        scenario=distilled(world_size=3, num_steps=3, dropout=0.1),
        tried=("F-KD-012",),
    ),
    Variant(
        name="kd-stops",
        summary="a student stops in its second epoch, and the teacher sees a sample at a time",
        plants={f"{DISTILL}.teacher.batches": in_order},
        scenario=distilled(num_steps=4, stops=(1, 3), dropout=0.1),
        tried=("F-KD-013",),
    ),
    Variant(
        name="kd-leaves",
        summary="a student's worker leaves, and the teacher sees a sample at a time",
        plants={f"{DISTILL}.teacher.batches": in_order},
        scenario=distilled(
            world_size=3, num_steps=3, faults=(Fault(kind="leave", rank=2, step=1),)
        ),
        tried=("F-KD-014",),
    ),
)
