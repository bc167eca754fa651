"""Validation of the arguments of `observe`, before any hook is set."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.check.observing.outer_synchronisation import OuterOptimizer
from entrenar_py.shared.errors import UsageError

_log = logging.getLogger("entrenar_py")


def optimizers(model: object, argument: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that step, without wrappers or containers around them.

    Raises UsageError if `argument` is not one or several optimizers, if `model` is not a module, or
    if a parameter gets its shape only in the first pass.
    Logs a warning for each optimizer that steps no parameter of the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model={_shown(model)}: give the torch.nn.Module that is trained, and its optimizer "
            "after it: observe(model, optimizer)"
        )
    if lazy := next((n for n, p in model.named_parameters() if is_lazy(p)), None):
        raise UsageError(
            f"model: {lazy} gets its shape only in the first pass, as in LazyLinear: call the "
            "model once before, with any batch and under torch.no_grad()"
        )
    several = isinstance(argument, Iterable) and not hasattr(argument, "step")
    stepping = tuple(
        one for each in (argument if several else (argument,)) for one in _stepping(each)
    )
    if not stepping or not all(hasattr(opt, "register_step_pre_hook") for opt in stepping):
        raise UsageError(
            f"optimizer={_shown(argument)}: give the torch.optim.Optimizer of the model, or "
            "several: observe(model, [first, second])"
        )
    zero, parameters = flat_parameters.zero_optimizer(model), set(model.parameters())
    for optimizer in stepping:
        is_inside = getattr(zero, "optimizer", None) is optimizer
        if not is_inside and parameters.isdisjoint(tensors.stepped_by(optimizer)):
            _log.warning(
                "observe: %s steps no parameter of the model: it was made for another model, or "
                "before the parameters were replaced (by a copy, or a move to a device)",
                type(optimizer).__name__,
            )
    return stepping


def _stepping(given: Any) -> list[Any]:
    return tensors.stepping(given) if hasattr(given, "param_groups") else [given]


def outer(optimizer: Any, weights: Any, inner_steps: Any) -> OuterOptimizer:
    """Return the outer optimizer that `synchronised` received, with its weights by name.

    Raises UsageError for an optimizer without weights, for weights without an optimizer, and for
    values of a wrong type.
    """
    if (optimizer is None) != (weights is None):
        raise UsageError(
            f"synchronised: optimizer={_shown(optimizer)} and weights={_shown(weights)}: give "
            "both, synchronised(outer, {name: tensor}); or neither, if weights are simply averaged"
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"synchronised: optimizer={_shown(optimizer)}: give the outer torch.optim.Optimizer"
        )
    if weights is not None and not isinstance(weights, Mapping):
        raise UsageError(
            f"synchronised: weights={_shown(weights)}: give {{name: tensor}}, the tensors that the "
            "outer optimizer steps"
        )
    if inner_steps is not None:
        inner_steps = steps("inner_steps", inner_steps, least=1)
    return OuterOptimizer(optimizer=optimizer, weights=weights or {}, inner_steps=inner_steps)


def steps(name: str, count: Any, *, least: int) -> int:
    """Return `count` as an int; numpy and torch integers are accepted.

    Raises UsageError if it is not an integer, or is less than `least`.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name}={count!r}: give a number of steps, {least} or more")
    return number


def require_callable(name: str, value: Callable[..., object] | None) -> None:
    """Raise UsageError unless `value` can be called or is None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={_shown(value)}: give a function that takes one finding")


def _shown(value: object) -> str:
    # The repr of a module can have many lines.
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
