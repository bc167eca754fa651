"""What `observe` was given: refused where it can't be meant, before any hook is set."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from entrenar_py.errors import UsageError
from entrenar_py.observing import tensors

_log = logging.getLogger("entrenar_py")


def _module(model: object) -> torch.nn.Module:
    """The module that it is; UsageError for anything else."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model={_told(model)}: give the torch.nn.Module that is trained, and its optimizer "
            "after it: observe(model, optimizer)"
        )
    return model


def optimizers(model: object, given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Those that step, out of what is around them; UsageError for what none is, and for a `model`
    that is no module.
    """
    module = _module(model)
    several = isinstance(given, Iterable) and not hasattr(given, "step")
    found = tuple(map(tensors.unwrapped_optimizer, given if several else (given,)))
    if not found or not all(hasattr(one, "register_step_pre_hook") for one in found):
        raise UsageError(
            f"optimizer={_told(given)}: give the torch.optim.Optimizer of the model, or several: "
            "observe(model, [first, second])"
        )
    _look_for_strangers(module, found)
    return found


def _look_for_strangers(model: torch.nn.Module, given: Iterable[torch.optim.Optimizer]) -> None:
    """Warns of an optimizer that steps nothing of the model: nothing of it would be seen."""
    held = set(model.parameters())
    for one in given:
        stepped = {parameter for group in one.param_groups for parameter in group["params"]}
        if held.isdisjoint(stepped):
            _log.warning(
                "observe: none of the parameters of %s is one of the model's: it was made before "
                "they were replaced (by a copy, or on their way to a device), or for another model",
                type(one).__name__,
            )


def steps(name: str, count: Any, *, least: int) -> int:
    """`count` as an integer (numpy's and torch's are, too); UsageError where it is none, or less
    than `least`.
    """
    try:
        found = operator.index(count)
    except TypeError:
        found = least - 1
    if found < least:
        raise UsageError(f"{name}={count!r}: give a number of steps, {least} or more")
    return found


def require_callable(name: str, one: Callable[..., object] | None) -> None:
    """Returns if it can be called, or is None; UsageError, by its name, where not."""
    if one is not None and not callable(one):
        raise UsageError(f"{name}={_told(one)}: give a function of one finding")


def _told(one: object) -> str:
    """Short: a module or an optimizer tells all of itself."""
    told = repr(one)
    return told if len(told) <= 40 and "\n" not in told else f"a {type(one).__name__}"
