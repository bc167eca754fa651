"""The step that a rank is in: its gradients, what they hold, and how they are clipped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from entrenar_py.check.observing import tensors
from entrenar_py.check.observing.step_in_work import Clips, GradientSources, StepInWork
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
    before = subject.record(subject.gradients(), exact=False)["weight"]
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


def digest(_: str, gradient: torch.Tensor) -> str:
    return str(gradient.tolist())


def passes(sources: GradientSources, step: int, *numbers: int, grad: torch.Tensor | None) -> None:
    """Begin and end a backward pass of `w` for each micro-batch in `numbers`."""
    for number in numbers:
        sources.before_backward({"w": grad})
        sources.after_backward(step, number, ("w",))
        grad = torch.ones(3)


def test_cleared_gradients_are_not_told() -> None:
    """Neither if they are dropped, nor if they are zeroed."""
    sources = GradientSources(digest)
    for step, cleared in enumerate((None, None, torch.zeros(3))):
        passes(sources, step, 0, 1, grad=cleared)
        sources.apply(step, {"w": torch.ones(3)}, {})
        assert sources.end_step() == ({}, {})


def test_a_gradient_that_was_applied_and_not_cleared_is_told() -> None:
    """With the first step that is still in it."""
    sources = GradientSources(digest)
    passes(sources, 0, 0, grad=None)
    sources.apply(0, {"w": torch.ones(3)}, {})
    sources.end_step()
    passes(sources, 1, 0, grad=torch.ones(3))
    sources.apply(1, {"w": 2 * torch.ones(3)}, {})
    assert sources.end_step() == ({"w": 0}, {})
    passes(sources, 2, 0, grad=2 * torch.ones(3))
    sources.apply(2, {"w": 3 * torch.ones(3)}, {})
    assert sources.end_step() == ({"w": 0}, {})


def test_a_step_without_a_backward_pass_keeps_its_gradient() -> None:
    """The same gradient is applied again."""
    sources = GradientSources(digest)
    passes(sources, 4, 0, grad=None)
    sources.apply(4, {"w": torch.ones(3)}, {})
    sources.end_step()
    sources.apply(5, {"w": torch.ones(3)}, {})
    assert sources.end_step() == ({"w": 4}, {})


def test_a_gradient_that_was_changed_is_not_kept() -> None:
    """Momentum by hand leaves something else than what was applied."""
    sources = GradientSources(digest)
    passes(sources, 0, 0, grad=None)
    sources.apply(0, {"w": torch.ones(3)}, {})
    sources.end_step()
    passes(sources, 1, 0, grad=0.9 * torch.ones(3))
    sources.apply(1, {"w": 2 * torch.ones(3)}, {})
    assert sources.end_step() == ({}, {})


def test_a_micro_batch_that_was_cleared_is_left_out() -> None:
    """The applied gradient holds only those since."""
    sources = GradientSources(digest)
    passes(sources, 0, 0, grad=None)
    passes(sources, 0, 1, 2, grad=torch.zeros(3))
    sources.apply(0, {"w": torch.ones(3)}, {})
    assert sources.end_step() == ({}, {"w": (1, 2)})


def test_repeated_passes_are_forgotten() -> None:
    """A pass of the same samples at moved weights replaces the first one."""
    sources = GradientSources(digest)
    passes(sources, 0, 0, grad=None)
    sources.before_backward({"w": None})
    sources.forget_passes()
    sources.after_backward(0, 0, ("w",))
    sources.apply(0, {"w": torch.ones(3)}, {})
    assert sources.end_step() == ({}, {})


Calls = Sequence[tuple[str, float, float]]  # of a step: the parameters, max_norm and norm_type


@pytest.mark.parametrize(
    ("steps", "limit"),
    [
        ([[("ab", 0.5, 2)], [("ab", 0.5, 2)]], 0.5),
        ([[("abc", 1, 2.0)]], 1.0),  # with a parameter that has no gradient
        ([[("ab", 0.5, 2)], [("ab", 0.6, 2)], [("ab", 0.5, 2)]], None),  # it follows something
        ([[("ab", 0.5, 2)], []], None),  # not in every step
        ([[], [("ab", 0.5, 2)]], None),
        ([[("ab", 0.5, 2), ("ab", 0.5, 2)]], None),  # each micro-batch
        ([[("a", 0.5, 2), ("b", 0.5, 2)]], None),  # in parts
        ([[("a", 0.5, 2)]], None),
        ([[("ab", 0.5, float("inf"))]], None),  # another norm
        ([[("ab", float("inf"), 2)]], None),  # to know the norm
        ([[("ab", 32768.0, 2)]], None),  # times the loss scale
    ],
)
def test_the_limit(steps: Sequence[Calls], limit: float | None) -> None:
    """It is known if each step clips all gradients once, to the same round number."""
    held = {name: torch.ones(1, requires_grad=True) for name in "abc"}
    held["a"].grad = held["b"].grad = torch.ones(1)
    clips = Clips()
    for calls in steps:
        for names, max_norm, norm_type in calls:
            clips.note([held[name] for name in names], max_norm, norm_type)
        clips.end_step(held.values())
    assert clips.limit == limit


def test_a_skipped_step() -> None:
    """A step that a loss scaler skips has clipped, and is not made."""
    weights, clips = torch.ones(1, requires_grad=True), Clips()
    weights.grad = torch.ones(1)
    clips.note(weights, 0.5, 2)
    clips.forget()
    clips.note(weights, 0.5, 2)
    clips.end_step([weights])
    assert clips.limit == 0.5
