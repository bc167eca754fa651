"""Calls of the harness's torch hooks: none in compiled code, one per step if steps are nested.

A compiled script reaches hooks in two ways. If torch calls a hook from Python, dynamo would compile
the hook's frame, so it is instructed to run that frame uncompiled. If dynamo traces the call of a
module, the module's hooks are traced, too. They then do nothing, so that the graphs are those of
the script alone.
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

# The code that torch wraps around the `step` of each optimizer class to call its hooks.
STEPPING = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__


# Private names of dynamo, which another version of torch may lack.
_NAMES = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
LACKING = [name for name in _NAMES if not hasattr(torch._C._dynamo.eval_frame, name)]


def notes() -> dict[str, str]:
    """Return notes by subject on what a compiling script does to hooks; {} for most torches."""
    if not LACKING:
        return {}
    lacking = ", ".join(LACKING)
    return {"torch.compile": f"may compile hooks of the harness (this torch lacks {lacking})"}


def leave(code: CodeType, *, with_calls: bool) -> None:
    """Have dynamo run frames of `code` uncompiled, and with `with_calls` all that they call.

    Does nothing if torch lacks the functions for this; `notes` then says so.
    """
    if LACKING:
        return
    dynamo = torch._C._dynamo.eval_frame
    calls = dynamo._FrameAction.SKIP if with_calls else dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, calls))


def leave_steps() -> None:
    """Have torch call an optimizer's hooks even if a script compiles its steps.

    Otherwise dynamo would trace the hooks. Only the code around `step`, which has no tensor
    operations, stays uncompiled. The step itself is compiled as before, since torch breaks the
    graph where it begins.
    """
    leave(STEPPING, with_calls=False)


def ours(function: _Function) -> _Function:
    """Return `function`, marked so that dynamo runs it, and all that it calls, uncompiled."""
    leave(function.__code__, with_calls=True)
    return function


def outside(function: Callable[_Given, _Result]) -> Callable[_Given, _Result | None]:
    """Return `function` as a hook that is never compiled, and that does nothing while traced.

    So hooks don't see calls within compiled code. They see the call of a compiled module itself.
    """

    @wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result | None:
        if is_traced():
            return None
        return function(*given, **named)

    return ours(call)


def is_traced() -> bool:
    """Return whether the running code is compiled, or transformed by `torch.func` (`vmap`, `grad`).

    A transformed function computes with wrappers of tensors, which have no values of their own.
    """
    transforms = torch._C._functorch
    return torch.compiler.is_compiling() or transforms.peek_interpreter_stack() is not None


def has_compiled() -> bool:
    """Return whether dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("stats"))


def is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the running `step` of `optimizer` was called by another `step` of it.

    torch calls an optimizer's hooks both in the `step` of its class and in that of the base class.
    An optimizer that reduces gradients in `step` and then calls `super().step()` runs both.
    """
    return len([*islice(_steps_of(optimizer), 2)]) > 1


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a `step` of `optimizer` is running."""
    return any(_steps_of(optimizer))


def _steps_of(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is STEPPING and frame.f_locals.get("self") is optimizer:
            yield True
        frame = frame.f_back
