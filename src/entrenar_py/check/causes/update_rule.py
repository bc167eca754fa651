"""Recompute optimizer steps in float64, from the recorded gradients and weights.

The formulas are those of torch.optim, written from the papers as torch documents them,
independently of every trainer here. A rule updates a tensor's `Moments`. It returns how far the
weight moves against the gradient, and the sum of the absolute values of the terms of that move, to
which rounding is proportional. The constants are torch's defaults, unless a user's trainer declares
others in its trace's `traits` (momentum, dampening, nesterov, betas, eps, and `decay: coupled` for
an Adam with decay as a part of the gradient) or in its events (`Ruled`). Steps start from the
recorded gradient, so its rounding noise makes no difference, and errors under Adam are detected
that a comparison of runs can't detect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import precision
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Event,
    Ruled,
    Saved,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Traits,
    Update,
)

Vector = NDArray[np.float64]
Move = tuple[Vector, Vector]


@dataclass
class Moments:
    """The optimizer's state of one tensor. `size` is `first` with absolute values of the terms.

    `steps` counts the steps in which the tensor had a gradient, as torch's optimizers do. `third`
    and `product` are for rules that keep more state.
    """

    steps: int = 0
    first: Vector | float = 0.0
    second: Vector | float = 0.0
    size: Vector | float = 0.0
    third: Vector | float = 0.0
    product: float = 1.0


@dataclass(frozen=True)
class Constants:
    """The constants of a torch parameter group, with torch's defaults for missing ones.

    `decoupled_weight_decay` is True if weight decay shrinks the weight separately from the
    gradient.
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
    roundings: float = 1.0  # the factor of a move's allowed error, for constants in float32


@dataclass(frozen=True)
class TensorRule:
    """The rule by which one of torch's optimizers steps one tensor."""

    kind: str
    constants: Constants

    def move(self, moments: Moments, gradient: Vector, weight: Vector, rate: float) -> Move:
        """Return the move against the gradient in one step, and the size of its terms."""
        group, decay = self.constants, self.constants.weight_decay
        moments.steps += 1
        gradient = -gradient if group.maximize else gradient
        size = np.abs(gradient)
        shrunk = np.zeros_like(weight)
        if group.decoupled_weight_decay or self.kind == "AdamW":
            shrunk = rate * decay * weight
            weight = weight - shrunk
        elif decay:
            gradient, size = gradient + decay * weight, size + decay * np.abs(weight)
        moved, terms = _RULES[self.kind](group, moments, gradient, size)
        return rate * moved + shrunk, rate * terms * group.roundings + np.abs(shrunk)


def rule_of(event: Ruled) -> TensorRule | None:
    """Return the rule that an event describes; None if it is unknown here."""
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
    return bool(events) and all(rule_of(event) is not None for event in events)


def are_derived(trace: Trace) -> bool:
    """Return whether an optimizer's class is the user's, derived from one of torch's."""
    return any(event.derived for event in trace.of(Ruled))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- the rules --------------------------------------------------------------------------------


def _sgd(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    if not group.momentum:
        return gradient, size
    new = 1.0 if isinstance(moments.first, float) else 1 - group.dampening
    moments.first = moved = group.momentum * moments.first + new * gradient
    moments.size = terms = group.momentum * moments.size + new * size
    if group.nesterov:
        return gradient + group.momentum * moved, size + group.momentum * terms
    return moved, terms


def _averages(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Vector:
    beta1, beta2 = group.betas
    moments.first = beta1 * moments.first + (1 - beta1) * gradient
    moments.size = beta1 * moments.size + (1 - beta1) * size
    moments.second = second = beta2 * moments.second + (1 - beta2) * np.square(gradient)
    return np.asarray(second)


def _adam(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = group.betas
    second = _averages(group, moments, gradient, size)
    if group.amsgrad:
        moments.third = second = np.maximum(moments.third, second)
    root = np.sqrt(second / (1 - beta2**moments.steps)) + group.eps
    correction = 1 - beta1**moments.steps
    return moments.first / correction / root, moments.size / correction / root


def _nadam(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = group.betas
    root = np.sqrt(_averages(group, moments, gradient, size) / (1 - beta2**moments.steps))
    root += group.eps
    now, then = (
        beta1 * (1 - 0.5 * 0.96 ** ((moments.steps + ahead) * group.momentum_decay))
        for ahead in (0, 1)
    )
    moments.product *= now
    parts = (1 - now) / (1 - moments.product), then / (1 - moments.product * then)
    moved = (parts[0] * gradient + parts[1] * moments.first) / root
    return moved, (parts[0] * size + parts[1] * moments.size) / root


def _radam(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    (beta1, beta2), step = group.betas, moments.steps
    second = _averages(group, moments, gradient, size)
    correction = 1 - beta1**step
    whole = 2 / (1 - beta2) - 1
    length = whole - 2 * step * beta2**step / (1 - beta2**step)
    factor: Vector | float = 1.0
    if length > 5:  # otherwise nothing divides the move
        shares = (length - 4) * (length - 2) * whole / ((whole - 4) * (whole - 2) * length)
        factor = math.sqrt(shares * (1 - beta2**step)) / (np.sqrt(second) + group.eps)
    scale = np.asarray(factor / correction)
    return moments.first * scale, moments.size * scale


def _adamax(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    beta1, beta2 = group.betas
    moments.first = beta1 * moments.first + (1 - beta1) * gradient
    moments.size = beta1 * moments.size + (1 - beta1) * size
    moments.second = np.maximum(beta2 * moments.second, np.abs(gradient) + group.eps)
    divisor = (1 - beta1**moments.steps) * moments.second
    return moments.first / divisor, moments.size / divisor


def _rmsprop(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    second = group.alpha * moments.second + (1 - group.alpha) * np.square(gradient)
    moments.second, kept = second, second
    if group.centered:
        moments.third = group.alpha * moments.third + (1 - group.alpha) * gradient
        kept = np.maximum(second - np.square(moments.third), 0.0)
    root = np.sqrt(kept) + group.eps
    # The difference of two squares has the error of the larger one.
    size = size * (np.asarray(second) / np.where(kept > 0, kept, 1.0) if group.centered else 1.0)
    if not group.momentum:
        return gradient / root, size / root
    moments.first = moved = group.momentum * moments.first + gradient / root
    moments.size = terms = group.momentum * moments.size + size / root
    return moved, terms


def _adagrad(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    if moments.steps == 1:
        moments.second = group.initial_accumulator_value
    moments.second = second = moments.second + np.square(gradient)
    divisor = (np.sqrt(second) + group.eps) * (1 + (moments.steps - 1) * group.lr_decay)
    return gradient / divisor, size / divisor


def _adadelta(group: Constants, moments: Moments, gradient: Vector, size: Vector) -> Move:
    second = group.rho * moments.second + (1 - group.rho) * np.square(gradient)
    factor = np.sqrt(moments.third + group.eps) / np.sqrt(second + group.eps)
    moments.second = second
    moments.third = group.rho * moments.third + (1 - group.rho) * np.square(factor * gradient)
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


# --- one rank's optimizer, followed from update to update -----------------------------------------


# w - rate * g in float32 has two roundings of the result, u = 2^-24 each, and a third in fused
# forms. `rounding` adds one for each step that is summed in the moments.
UPDATE_ULPS = 8


@dataclass(frozen=True)
class Expected:
    """The expected tensor after a step.

    `moved` sums the absolute values of the terms of its change.
    """

    weight: Vector
    moved: Vector


def _of_betas(traits: Traits, betas: tuple[float, float]) -> float:
    """Return the factor of the allowed error of Adam's move, for the precision of its constants.

    In float32 a beta is off by one rounding of 1. So is 1 - beta, but the smaller it is, the larger
    is its relative error. Both are in the moments, and their powers are in the divisors of the
    moments. Only half of the second moment's error counts, since its root is taken.
    """
    if traits.betas_in == "float64":
        return 1.0
    return 1 + (2 / (1 - betas[0]) + 1 / (1 - betas[1])) / UPDATE_ULPS


@dataclass
class Rule:
    """One rank's optimizer, followed from update to update.

    `known` is False if the moments are unknown, for example after a gap in the recorded updates.
    `unknown` has the tensors that moved in a step without a recorded gradient. `saved` maps steps
    of checkpoints to the moments.
    """

    scenario: Scenario
    traits: Traits
    decayed: tuple[str, ...] | None
    weights: Tensors
    trainable: tuple[str, ...]
    known: bool
    step_made: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)
    saved: dict[int, dict[str, Moments]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    ruled: dict[str, TensorRule] = field(default_factory=dict)

    @property
    def is_stateless(self) -> bool:
        """True if a step follows from its gradient alone."""
        if self.traits.rule == "known":
            return self.scenario.optimizer == "sgd"
        return all(r.kind == "SGD" and not r.constants.momentum for r in self.ruled.values())

    def follows(self, update: Update) -> bool:
        """Return whether the moments before `update` are known, or the optimizer has none."""
        followed = self.known and update.step == self.step_made
        return followed or self.is_stateless

    def kind(self, name: str) -> str:
        """Return the name of the rule that steps a tensor."""
        if self.traits.rule == "known" or name not in self.ruled:
            return self.scenario.optimizer
        return self.ruled[name].kind

    def save(self, step: int) -> None:
        """Keep a copy of the moments, if known, for the checkpoint written before `step`."""
        if self.known and self.step_made == step:
            self.saved[step] = self.copied()

    def copied(self) -> dict[str, Moments]:
        """Return a copy of the moments, which later steps don't change."""
        return {name: replace(moments) for name, moments in self.moments.items()}

    def step(self, update: Update) -> Iterator[tuple[str, Expected]]:
        """Yield the name and expected value of each tensor that can be recomputed.

        The step starts from the weights of the update before, with those that were edited since.
        """
        before, self.weights = {**self.weights, **update.edited}, update.weights
        self.known = self.known and update.step == self.step_made
        self.step_made = update.step + 1
        factor = _clip_factor(self.scenario, update)
        if factor is None or not (self.known or self.is_stateless):
            self.known = False
            return
        if not self.is_stateless:
            self.unknown |= {
                name
                for name, record in update.weights.items()
                if name not in update.gradient
                and name in before
                and before[name].digest != record.digest
            }
        for name, record in update.gradient.items():
            if name in self.unknown:
                continue
            slope, weight = record.elements(), before[name].elements() if name in before else None
            if slope is None or weight is None or slope.shape != weight.shape:
                self.known = False
                continue
            if (rule := self._rule_of(name)) is not None:
                gradient = factor * slope.astype(np.float64)
                rate, wide = update.rate_of(name), weight.astype(np.float64)
                yield name, self._expected(name, rule, wide, gradient, rate)

    def _rule_of(self, name: str) -> TensorRule | None:
        """Return the rule that steps a tensor; None if the rule or its weight decay is unknown."""
        traits, decay = self.traits, self.scenario.weight_decay
        if traits.rule != "known":
            return self.ruled.get(name)
        if decay and self.decayed is None:
            return None
        is_adam, has_momentum = (self.scenario.optimizer == n for n in ("adamw", "momentum"))
        constants = Constants(
            weight_decay=decay if name in (self.decayed or ()) else 0.0,
            momentum=traits.momentum if has_momentum else 0.0,
            dampening=traits.dampening,
            nesterov=traits.nesterov,
            betas=traits.betas,
            eps=traits.eps,
            decoupled_weight_decay=is_adam and traits.decay != "coupled",
            roundings=_of_betas(traits, traits.betas) if is_adam else 1.0,
        )
        return TensorRule("Adam" if is_adam else "SGD", constants)

    @np.errstate(invalid="ignore", over="ignore")  # an overflow is compared like any value
    def _expected(
        self, name: str, rule: TensorRule, weight: Vector, gradient: Vector, rate: float
    ) -> Expected:
        moments = self.moments.setdefault(name, Moments())
        moved, size = rule.move(moments, gradient, weight, rate)
        if self.traits.rule != "known":
            size = size * _of_betas(self.traits, rule.constants.betas)
        return Expected(weight - moved, size)


def after(rules: Mapping[int, Rule], start: Start, trace: Trace) -> Rule:
    """Return the rule of the rank that starts: a new one or, after a resume, its earlier one.

    A rank that resumes from a checkpoint has the moments of the time when the checkpoint was
    written. A rank that joins has the moments of the others.
    """
    own = rules.get(start.rank)
    if own is not None and start.resumed:
        own.weights = start.weights
        if start.step != own.step_made and start.step in own.saved:
            own.moments, own.step_made, own.known = own.saved[start.step], start.step, True
            own.moments = own.copied()
        return own
    rule = Rule(
        trace.scenario,
        trace.traits,
        start.decayed,
        start.weights,
        start.trainable,
        known=start.step == 0,
    )
    for other in rules.values():
        if start.step and other.known and other.step_made == start.step:
            rule.known, rule.step_made, rule.moments = True, start.step, other.copied()
            break
    return rule


def prepare(rules: dict[int, Rule], event: Event, trace: Trace) -> None:
    """Change the ranks' rules as `event` requires: a start, a checkpoint or a synchronisation."""
    if isinstance(event, Start):
        rules[event.rank] = after(rules, event, trace)
    elif isinstance(event, Ruled):
        if (new := rule_of(event)) is not None:
            for rank, rule in rules.items():
                fresh = dict.fromkeys(event.names, new)
                is_own = rank == event.rank
                rule.ruled = {**rule.ruled, **fresh} if is_own else {**fresh, **rule.ruled}
    elif isinstance(event, Saved):
        for rule in rules.values():
            rule.save(event.step)
    elif isinstance(event, Synchronised) and event.rank in rules:
        rule = rules[event.rank]  # keeps the moments
        rule.weights = {**rule.weights, **event.weights}


def start_of(trace: Trace, step: int, rank: int) -> Start | None:
    """Return the start from which `rank` took `step` as its first one; None if there is none."""
    starts = (start for start in trace.standing.of(Start) if start.rank == rank)
    return next((start for start in starts if start.step == step), None)


def rounding(trace: Trace, update: Update) -> float:
    """Return the relative error that the roundings of the rule cause in `update`."""
    unit = precision.FLOAT32
    if trace.scenario.workload == "own":
        unit = precision.unit_of(update.weights)
    is_stateless = trace.traits.rule == "known" and trace.scenario.optimizer == "sgd"
    roundings = UPDATE_ULPS + (0 if is_stateless else update.step)
    return roundings * unit


def allowed(rounding: float, expected: Expected) -> Vector:
    """Return how far each element may be from `expected`, for the relative error `rounding`."""
    return rounding * (np.abs(expected.weight) + expected.moved)


def followed(trace: Trace) -> Iterator[tuple[Update, dict[str, Expected]]]:
    """Yield each update of a rank that has started, with the tensors that its rule expects."""
    rules: dict[int, Rule] = {}
    for event in trace.standing.events:
        if not isinstance(event, Update):
            prepare(rules, event, trace)
        elif event.rank in rules:
            yield event, dict(rules[event.rank].step(event))


def is_met(update: Update, name: str, expected: Expected, rounding: float) -> bool | None:
    """Return whether a tensor is as expected after `update`; None if that is unknown."""
    after = update.weights[name].elements() if name in update.weights else None
    if after is None or after.shape != expected.weight.shape:
        return None
    return bool((np.abs(after - expected.weight) <= allowed(rounding, expected)).all())


def is_followed(trace: Trace, step: int, rank: int, name: str) -> bool | None:
    """Return whether the rank's update of a tensor follows the rule; None if that is unknown."""
    for update, expected in followed(trace) if trace.traits.rule == "known" else ():
        if (update.step, update.rank) == (step, rank) and name in expected:
            return is_met(update, name, expected[name], rounding(trace, update))
    return None


def _clip_factor(scenario: Scenario, update: Update) -> float | None:
    """Return the factor by which clipping multiplied the recorded gradient; None if unknown.

    Without recorded norms it is 1 if the run declares no clipping.
    """
    norm, applied = update.grad_norm, update.applied_norm
    if not update.finite:
        return None
    if norm is None or applied is None:
        unclipped = scenario.clip_norm is None and evidence.non_finite(update.gradient) is None
        return 1.0 if unclipped else None
    if not (math.isfinite(norm) and math.isfinite(applied)):
        return None
    return min(1.0, applied / norm) if norm else 1.0
