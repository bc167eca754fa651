"""Which calls of hooks count."""

from __future__ import annotations

from typing import Any

import torch

from entrenar_py import hook_calls


class Twice(torch.optim.SGD):
    """An optimizer whose step calls that of its base class."""

    def step(self, closure: Any = None) -> Any:
        """Make a step of SGD."""
        return super().step(closure)


def test_a_step_within_a_step() -> None:
    """A hook is called in both steps, and can tell which one it is in."""
    weights = torch.ones(2, requires_grad=True)
    optimizer, nested = Twice([weights], lr=0.1), list[bool]()
    optimizer.register_step_post_hook(lambda opt, *_: nested.append(hook_calls.is_nested(opt)))
    optimizer.step()
    assert nested == [True, False]


def test_a_hook_returns_what_its_function_returns() -> None:
    """Outside of compiled code a hook is its function."""
    assert hook_calls.outside(max)(1, 2) == 2
