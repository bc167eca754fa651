"""Lets calls of our hooks count, but not in compiled code, nor in a step within a step.

A compiled script calls hooks in two ways. Where torch calls a hook from Python, dynamo would
compile the hook's frame: it is told to run it as it is. Where dynamo traces the call of a module,
the hook is a part of what it traces: there it does nothing, and the graphs are the script's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])

# The code that torch wraps around the `step` of each class of optimizers, to call its hooks.
STEPPING = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


# Dynamo's own names, which another torch may lack.
_NAMES = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
LACKING = [name for name in _NAMES if not hasattr(torch._C._dynamo.eval_frame, name)]


def notes() -> dict[str, str]:
    """Return by subject what can't be kept from scripts that compile, nothing with most torches."""
    if not LACKING:
        return {}
    lacking = ", ".join(LACKING)
    return {"torch.compile": f"may compile hooks of the harness (this torch lacks {lacking})"}


def leave(code: CodeType, *, with_calls: bool) -> None:
    """Have dynamo run the frames of `code` as they are, and what they call if `with_calls`.

    Does nothing where torch lacks what that takes; `notes` says so.
    """
    if LACKING:
        return
    dynamo = torch._C._dynamo.eval_frame
    calls = dynamo._FrameAction.SKIP if with_calls else dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, calls))


def leave_steps() -> None:
    """Have the hooks of optimizers called in scripts that compile their steps.

    Dynamo would trace the hooks. The code around the step has no operations; the step itself is
    compiled as ever, since torch breaks the graph at its begin.
    """
    leave(STEPPING, with_calls=False)


def ours(function: _Function) -> _Function:
    """Return `function`, marked: dynamo runs it, and all that it calls, as it is."""
    leave(function.__code__, with_calls=True)
    return function


def outside(function: Callable[_Given, _Result]) -> Callable[_Given, _Result | None]:
    """Return `function` for use as a hook: it isn't compiled, and does nothing where it is traced.

    So nothing is seen of what compiled code calls, but of the code itself if that is a module.
    """

    @wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result | None:
        if is_traced():
            return None
        return function(*given, **named)

    return ours(call)


def is_traced() -> bool:
    """Return whether what runs now is compiled, or transformed by `torch.func` (vmap, grad, jvp).

    A transformed function computes with wrappers of tensors, which have no values of their own.
    """
    transforms = torch._C._functorch
    return torch.compiler.is_compiling() or transforms.peek_interpreter_stack() is not None


def has_compiled() -> bool:
    """Return whether dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("stats"))


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this runs in a step of `optimizer` that another step of it has called.

    torch calls an optimizer's hooks in both steps, that of a class and that of its base class: an
    optimizer that reduces gradients in `step` and then calls `super().step()` has two.
    """
    return len([*islice(_steps_of(optimizer), 2)]) > 1


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this runs in a step of `optimizer`."""
    return any(_steps_of(optimizer))


def _steps_of(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is STEPPING and frame.f_locals.get("self") is optimizer:
            yield True
        frame = frame.f_back
