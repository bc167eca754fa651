"""F-TI-008: learning rate and clipping are functions of the step and the global gradient alone.

Needs no second run: the schedule's closed form, the clipped norm, and for plain SGD the update
itself are recomputed from what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Tally

# Norms and rates are single float32 or float64 quantities: a few roundings apart, 1e-6 for the
# epsilon in torch's clipping (1e-6 / norm, with norms above 0.01 here).
RELATIVE = 2e-4
# w - rate * g in float32: two roundings of the result, u = 2^-24 each, and a third for fused forms.
UPDATE_ULPS = 8


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every update of every rank."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        before: dict[int, Tensors] = {
            start.rank: start.weights for start in reversed(trace.of(Start))
        }
        for event in trace.events:
            if isinstance(event, Start):
                before[event.rank] = event.weights
            elif isinstance(event, Update):
                place = {
                    "step": event.step,
                    "rank": event.rank,
                    "scenario": trace.scenario.to_dict(),
                }
                _rate(tally, trace.scenario, event, place)
                _clipping(tally, trace.scenario, event, place)
                _sgd(tally, trace.scenario, before.get(event.rank, {}), event, place)
                before[event.rank] = event.weights
    return tally.finding(nothing="no update was recorded")


def expected_rate(scenario: Scenario, step: int) -> float:
    """The closed form of the scenario's schedule, written independently of the trainer's."""
    rate, warmup = scenario.learning_rate, scenario.warmup_steps
    if step < warmup:
        return rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(scenario.num_steps - warmup, 1)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return rate * factor[scenario.schedule]


def _rate(tally: Tally, scenario: Scenario, update: Update, place: Mapping[str, Any]) -> None:
    expected = expected_rate(scenario, update.step)
    tally.check(
        abs(update.learning_rate - expected) <= RELATIVE * scenario.learning_rate,
        f"learning rate of step {update.step} is not the {scenario.schedule} schedule's",
        expected=repr(expected),
        got=repr(update.learning_rate),
        **place,
    )


def _clipping(tally: Tally, scenario: Scenario, update: Update, place: Mapping[str, Any]) -> None:
    if update.grad_norm is None or update.applied_norm is None:
        return
    if not (math.isfinite(update.grad_norm) and math.isfinite(update.applied_norm)):
        return  # for F-DP-003 to judge
    recorded = _flat(update.gradient)
    if recorded is not None:
        norm = float(np.sqrt(np.square(recorded).sum()))
        tally.check(
            abs(update.grad_norm - norm) <= RELATIVE * norm,
            "the norm is not that of the averaged gradient",
            expected=repr(norm),
            got=repr(update.grad_norm),
            **place,
        )
    limit = math.inf if scenario.clip_norm is None else scenario.clip_norm
    expected = min(update.grad_norm, limit)
    tally.check(
        abs(update.applied_norm - expected) <= RELATIVE * expected,
        f"the applied gradient's norm is not min(norm, {scenario.clip_norm})",
        expected=repr(expected),
        got=repr(update.applied_norm),
        **place,
    )


def _sgd(
    tally: Tally, scenario: Scenario, before: Tensors, update: Update, place: Mapping[str, Any]
) -> None:
    """w' = w - rate * clipped gradient, element by element, for SGD without weight decay."""
    if scenario.optimizer != "sgd" or scenario.weight_decay or not update.grad_norm:
        return
    if not (update.finite and math.isfinite(update.grad_norm)):
        return
    scale = update.learning_rate * min(1.0, (update.applied_norm or 0.0) / update.grad_norm)
    for name in update.gradient:
        weight, after, slope = (
            tensors[name].values() if name in tensors else None
            for tensors in (before, update.weights, update.gradient)
        )
        if weight is None or after is None or slope is None:
            continue
        if not weight.size == after.size == slope.size > 0:
            continue
        expected = weight.astype(np.float64) - scale * slope.astype(np.float64)
        size = np.abs(weight) + np.abs(expected) + np.abs(scale * slope)
        gap = (
            np.abs(after - expected)
            - UPDATE_ULPS * 2.0**-24 * size
            - RELATIVE * np.abs(scale * slope)
        )
        element = int(gap.argmax())
        tally.check(
            bool((gap <= 0).all()),
            f"{name} did not move by learning rate times clipped gradient",
            tensor=name,
            element=element,
            expected=repr(float(expected.flat[element])),
            got=repr(float(after.flat[element])),
            **place,
        )


def _flat(tensors: Tensors) -> np.ndarray[Any, Any] | None:
    values = [record.values() for record in tensors.values()]
    known = [value.astype(np.float64) for value in values if value is not None]
    return np.concatenate(known) if known and len(known) == len(values) else None
