"""The clipping norm of a script is taken from its calls only where these say one norm for all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from entrenar_py.check.observing.step_in_work import Clips

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
