"""Which calls of hooks count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entrenar_py.shared import hook_calls


class Twice(torch.optim.SGD):
    """An optimizer whose step calls that of its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_within_a_step() -> None:
    """A hook is called in both steps, and can tell which one it is in."""
    weights = torch.ones(2, requires_grad=True)
    torch.optim.SGD([weights], lr=0.1)  # since then its step calls hooks, too
    optimizer, nested = Twice([weights], lr=0.1), list[bool]()
    optimizer.register_step_post_hook(lambda opt, *_: nested.append(hook_calls.is_nested(opt)))
    optimizer.step()
    assert nested == [True, False]


def test_a_hook_returns_what_its_function_returns() -> None:
    """Outside of compiled code a hook is its function."""
    assert hook_calls.outside(max)(1, 2) == 2


def test_a_torch_without_dynamo_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks work, and the record says that torch.compile may take them in."""
    assert hook_calls.notes() == {}
    monkeypatch.setattr(hook_calls, "LACKING", ["_FrameAction"])
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameAction")
    assert hook_calls.outside(max)(1, 2) == 2
    assert "this torch lacks _FrameAction" in hook_calls.notes()["torch.compile"]
