"""The rules of torch.optim's optimizers, with constants that may differ by tensor and by step.

Each is written from the formulas of the papers as torch documents them, in float64. A rule changes
a tensor's `Moments`, and returns by how much the weight moves against the gradient, and the sum of
the absolute values of that move's terms: rounding is proportional to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.trace import Ruled, Trace

Vector = NDArray[np.float64]
Move = tuple[Vector, Vector]


@dataclass
class Moments:
    """The optimizer's state of one tensor. `size` is `first`, but of the terms' absolute values.

    `steps` counts the steps in which the tensor had a gradient, as torch's optimizers do. `third`
    and `product` are the state of rules that keep more.
    """

    steps: int = 0
    first: Vector | float = 0.0
    second: Vector | float = 0.0
    size: Vector | float = 0.0
    third: Vector | float = 0.0
    product: float = 1.0


@dataclass(frozen=True)
class Constants:
    """What a parameter group of torch's has, with the defaults of torch where it lacks something.

    `decays` is True if weight decay shrinks the weight apart from the gradient.
    """

    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    amsgrad: bool = False
    decoupled_weight_decay: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    alpha: float = 0.99
    centered: bool = False
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    rho: float = 0.9
    momentum_decay: float = 4e-3


@dataclass(frozen=True)
class TensorRule:
    """The rule by which an optimizer of torch's steps one tensor."""

    kind: str
    constants: Constants

    def move(self, moments: Moments, gradient: Vector, weight: Vector, rate: float) -> Move:
        """Return the move against the gradient in one step, with the size of its terms."""
        told, decay = self.constants, self.constants.weight_decay
        moments.steps += 1
        gradient = -gradient if told.maximize else gradient
        size = np.abs(gradient)
        shrunk = np.zeros_like(weight)
        if told.decoupled_weight_decay or self.kind == "AdamW":
            shrunk = rate * decay * weight
            weight = weight - shrunk
        elif decay:
            gradient, size = gradient + decay * weight, size + decay * np.abs(weight)
        moved, terms = _RULES[self.kind](told, moments, gradient, size)
        return rate * moved + shrunk, rate * terms + np.abs(shrunk)


def of(event: Ruled) -> TensorRule | None:
    """Return the rule that an event describes; None if it is not one that is known here."""
    defaults = vars(Constants())
    known = {name: value for name, value in event.constants.items() if name in defaults}
    if event.rule not in _RULES:
        return None
    for name, value in known.items():
        if name == "betas":
            is_pair = isinstance(value, list | tuple) and len(value) == 2
            if not (is_pair and all(map(_is_number, value))):
                return None
            known[name] = tuple(value)
        elif not _is_number(value):
            return None
    return TensorRule(event.rule, Constants(**known))


def are_known(trace: Trace) -> bool:
    """Return whether all optimizers of a run have rules that are known here."""
    events = trace.of(Ruled)
    return bool(events) and all(of(event) is not None for event in events)


def are_derived(trace: Trace) -> bool:
    """Return whether an optimizer is of a class of the user's, which is derived from torch's."""
    return any(event.derived for event in trace.of(Ruled))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- the rules --------------------------------------------------------------------------------


def _sgd(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    if not told.momentum:
        return gradient, size
    new = 1.0 if isinstance(moments.first, float) else 1 - told.dampening
    moments.first = moved = told.momentum * moments.first + new * gradient
    moments.size = terms = told.momentum * moments.size + new * size
    if told.nesterov:
        return gradient + told.momentum * moved, size + told.momentum * terms
    return moved, terms


def _averages(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Vector:
    """Move both averages of Adam and its like; return the second one, as Adam divides by it."""
    beta1, beta2 = told.betas
    moments.first = beta1 * moments.first + (1 - beta1) * gradient
    moments.size = beta1 * moments.size + (1 - beta1) * size
    moments.second = second = beta2 * moments.second + (1 - beta2) * np.square(gradient)
    return np.asarray(second)


def _adam(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = told.betas
    second = _averages(told, moments, gradient, size)
    if told.amsgrad:
        moments.third = second = np.maximum(moments.third, second)
    root = np.sqrt(second / (1 - beta2**moments.steps)) + told.eps
    correction = 1 - beta1**moments.steps
    return moments.first / correction / root, moments.size / correction / root


def _nadam(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = told.betas
    root = np.sqrt(_averages(told, moments, gradient, size) / (1 - beta2**moments.steps))
    root += told.eps
    now, then = (
        beta1 * (1 - 0.5 * 0.96 ** ((moments.steps + ahead) * told.momentum_decay))
        for ahead in (0, 1)
    )
    moments.product *= now
    parts = (1 - now) / (1 - moments.product), then / (1 - moments.product * then)
    moved = (parts[0] * gradient + parts[1] * moments.first) / root
    return moved, (parts[0] * size + parts[1] * moments.size) / root


def _radam(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    (beta1, beta2), step = told.betas, moments.steps
    second = _averages(told, moments, gradient, size)
    correction = 1 - beta1**step
    whole = 2 / (1 - beta2) - 1
    length = whole - 2 * step * beta2**step / (1 - beta2**step)
    factor: Vector | float = 1.0
    if length > 5:  # else the move is not divided by anything
        shares = (length - 4) * (length - 2) * whole / ((whole - 4) * (whole - 2) * length)
        factor = math.sqrt(shares * (1 - beta2**step)) / (np.sqrt(second) + told.eps)
    scale = np.asarray(factor / correction)
    return moments.first * scale, moments.size * scale


def _adamax(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = told.betas
    moments.first = beta1 * moments.first + (1 - beta1) * gradient
    moments.size = beta1 * moments.size + (1 - beta1) * size
    moments.second = np.maximum(beta2 * moments.second, np.abs(gradient) + told.eps)
    divisor = (1 - beta1**moments.steps) * moments.second
    return moments.first / divisor, moments.size / divisor


def _rmsprop(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    second = told.alpha * moments.second + (1 - told.alpha) * np.square(gradient)
    moments.second, kept = second, second
    if told.centered:
        moments.third = told.alpha * moments.third + (1 - told.alpha) * gradient
        kept = np.maximum(second - np.square(moments.third), 0.0)
    root = np.sqrt(kept) + told.eps
    # The difference of two squares is off by as much as the larger one is.
    size = size * (np.asarray(second) / np.where(kept > 0, kept, 1.0) if told.centered else 1.0)
    if not told.momentum:
        return gradient / root, size / root
    moments.first = moved = told.momentum * moments.first + gradient / root
    moments.size = terms = told.momentum * moments.size + size / root
    return moved, terms


def _adagrad(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    if moments.steps == 1:
        moments.second = told.initial_accumulator_value
    moments.second = second = moments.second + np.square(gradient)
    divisor = (np.sqrt(second) + told.eps) * (1 + (moments.steps - 1) * told.lr_decay)
    return gradient / divisor, size / divisor


def _adadelta(told: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    second = told.rho * moments.second + (1 - told.rho) * np.square(gradient)
    factor = np.sqrt(moments.third + told.eps) / np.sqrt(second + told.eps)
    moments.second = second
    moments.third = told.rho * moments.third + (1 - told.rho) * np.square(factor * gradient)
    return factor * gradient, factor * size


_RULES: Mapping[str, Callable[[Constants, Moments, Vector, Vector], Move]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _nadam,
    "RAdam": _radam,
    "Adamax": _adamax,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "Adadelta": _adadelta,
}
