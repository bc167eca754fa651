"""The student's loss: the fused one beside the plain one, and that beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.train.distill import student, teacher
from entrenar_py.train.distill.student import Mix, Taught
from entrenar_py.train.model import objectives
from entrenar_py.train.model.objectives import IGNORED

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
