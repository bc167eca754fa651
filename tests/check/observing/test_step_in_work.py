"""The step in work: its gradient and norms, and that the next step begins without any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrenar_py.check.observing import tensors
from entrenar_py.check.observing.step_in_work import StepInWork
from entrenar_py.check.observing.subject import Subject


@pytest.fixture
def subject() -> Subject:
    """Return a subject with one weight, whose gradient is 3."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Subject(model, [optimizer], declared=None, rank=0, world_size=1)


def test_gradients_are_those_that_are_applied(subject: Subject) -> None:
    """Without a call of `reduced`, applied gradients are recorded and norms are unknown."""
    step = StepInWork(subject, 7, {})
    step.apply(subject.optimizers[0], ["weight"])
    step.stepped.add(0)
    made = step.end()
    assert (made.step, list(made.gradient), made.grad_norm) == (7, ["weight"], None)
    assert (step.number, step.stepped) == (8, set())
    assert step.end().gradient == {}


def test_norms_before_and_after_clipping(subject: Subject) -> None:
    """If the script calls `reduced`, the gradients are those at that time."""
    step = StepInWork(subject, 0, {})
    step.reduced()
    before = step._gradient["weight"]
    weight = subject.trained["weight"]
    assert weight.grad is not None
    weight.grad /= 3
    step.apply(subject.optimizers[0], ["weight"])
    made = step.end()
    assert (made.grad_norm, made.applied_norm) == (3.0, 1.0)
    assert made.gradient["weight"] == before


def test_an_overflow_is_no_gradient(subject: Subject) -> None:
    """A step that a scaler skips applies no gradient."""
    step = StepInWork(subject, 0, {})
    step.reduced()
    step.excuse()
    made = step.end()
    assert (made.gradient, made.grad_norm) == ({}, None)


def test_weights_of_a_large_model_that_change_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are sketched where they have changed; nothing is recorded of those that haven't."""
    monkeypatch.setattr(tensors, "VALUES_MAX", 8)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = StepInWork(Subject(model, [optimizer], declared=None, rank=0, world_size=1), 0, {})
    step.start({})
    assert step.edited_weights(["weight", "bias"]) == {}
    with torch.no_grad():
        model.weight *= 2
    edited = step.edited_weights(["weight", "bias"])
    assert [*edited] == ["weight"]
    assert edited["weight"].sketch is not None
