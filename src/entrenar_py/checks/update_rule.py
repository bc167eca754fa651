"""What an optimizer step must have made of the weights, in float64, from what was recorded.

Written from the formulas of torch.optim's SGD and AdamW with their default constants, and
independently of every trainer here. Since the recorded gradient goes in, what is rounding noise in
the gradient is no difference in the step: this sees under Adam what parity can't.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.scenario import Scenario
from entrenar_py.trace import Start, Tensors, Update

MOMENTUM = 0.9
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """A tensor after a step. `moved` bounds the sum of the sizes of all terms it moved by."""

    weight: Vector
    moved: Vector


@dataclass
class Moments:
    """What the optimizer remembers of one tensor; `size` is `first` with every term's size."""

    first: Vector | float = 0.0
    second: Vector | float = 0.0
    size: Vector | float = 0.0


@dataclass
class Rule:
    """One rank's optimizer, followed from update to update.

    `known` says whether its moments are: not those of a worker that joined, nor behind a gap.
    """

    scenario: Scenario
    decayed: tuple[str, ...] | None
    weights: Tensors
    known: bool
    step_made: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)

    def step(self, update: Update) -> Iterator[tuple[str, Expected]]:
        """Name and expected weight of each tensor for which everything needed was recorded."""
        before, self.weights = self.weights, update.weights
        self.known = self.known and update.step == self.step_made
        self.step_made = update.step + 1
        factor = _clip_factor(update)
        if factor is None or not (self.known or self.scenario.optimizer == "sgd"):
            self.known = False
            return
        for name, record in update.gradient.items():
            slope, weight = record.values(), _values(before, name)
            if slope is None or weight is None or slope.shape != weight.shape:
                self.known = False
                continue
            decay = self._decay(name)
            if decay is not None:
                gradient = factor * slope.astype(np.float64)
                rate, held = update.learning_rate, weight.astype(np.float64)
                yield name, self._expected(name, held, gradient, rate, decay)

    def _decay(self, name: str) -> float | None:
        """The weight decay of a tensor; None where the trainer did not say which are decayed."""
        if not self.scenario.weight_decay:
            return 0.0
        if self.decayed is None:
            return None
        return self.scenario.weight_decay if name in self.decayed else 0.0

    @np.errstate(invalid="ignore", over="ignore")  # what overflows is compared as it is
    def _expected(
        self, name: str, weight: Vector, gradient: Vector, rate: float, decay: float
    ) -> Expected:
        moments = self.moments.setdefault(name, Moments())
        if self.scenario.optimizer == "adamw":
            kept = weight * (1 - rate * decay)
            moved, size = _adam(moments, gradient, self.step_made)
            return Expected(kept - rate * moved, rate * (size + decay * np.abs(weight)))
        coupled = gradient + decay * weight
        terms = np.abs(gradient) + decay * np.abs(weight)
        if self.scenario.optimizer == "sgd":
            return Expected(weight - rate * coupled, rate * terms)
        moments.first = MOMENTUM * moments.first + coupled
        moments.size = MOMENTUM * moments.size + terms
        return Expected(weight - rate * moments.first, rate * moments.size)


def after(rule: Rule | None, start: Start, scenario: Scenario) -> Rule:
    """The rule of the rank that starts: a new one, or after a resume the one it had (`rule`)."""
    if rule is not None and start.resumed:
        rule.weights = start.weights
        return rule
    return Rule(scenario, start.decayed, start.weights, known=start.step == 0)


def _adam(moments: Moments, gradient: Vector, count: int) -> tuple[Vector, Vector]:
    """Adam's direction in step `count`, counted from 1, and the size of its terms."""
    moments.first = BETA1 * moments.first + (1 - BETA1) * gradient
    moments.size = BETA1 * moments.size + (1 - BETA1) * np.abs(gradient)
    moments.second = BETA2 * moments.second + (1 - BETA2) * np.square(gradient)
    root = np.sqrt(moments.second / (1 - BETA2**count)) + EPSILON
    correction = 1 - BETA1**count
    return moments.first / correction / root, moments.size / correction / root


def _clip_factor(update: Update) -> float | None:
    """What the recorded gradient was multiplied by; None if that can't be told."""
    norm, applied = update.grad_norm, update.applied_norm
    if norm is None or applied is None or not update.finite:
        return None
    if not (math.isfinite(norm) and math.isfinite(applied)):
        return None
    return min(1.0, applied / norm) if norm else 1.0


def _values(tensors: Tensors, name: str) -> NDArray[Any] | None:
    return tensors[name].values() if name in tensors else None
