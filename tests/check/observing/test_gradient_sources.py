"""Which backward passes the gradient of a parameter holds when it is applied."""

from __future__ import annotations

import torch

from entrenar_py.check.observing.step_in_work import GradientSources


def digest(_: str, gradient: torch.Tensor) -> str:
    """Return a text that is equal for equal gradients."""
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
