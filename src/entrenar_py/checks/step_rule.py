"""F-TI-008: learning rate and clipping are functions of the step and the global gradient alone.

Needs no second run: the schedule's closed form, the clipped norm, and the update itself are
recomputed from what was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entrenar_py.checks import evidence, missing, update_rule
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Start, Trace, Update
from entrenar_py.verdict import Finding, Tally

# Where a contract gives no tolerance: rates and norms are sums or products in float32, whose n
# roundings of random sign add up to sqrt(n) 2^-24, for n = 10,000 elements 6e-6.
RELATIVE = 1e-5
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6
# w - rate * g in float32: two roundings of the result, u = 2^-24 each, a third for fused forms, and
# for moments one more in each step that is added up in them.
UPDATE_ULPS = 8


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every update of every rank."""
    tally = Tally(invariant.id)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    for trace in evidence.usable(traces, tally):
        num_moved = 0
        rules: dict[int, update_rule.Rule] = {}
        for event in trace.events:
            if isinstance(event, Start):
                rules[event.rank] = update_rule.after(rules.get(event.rank), event, trace.scenario)
            elif isinstance(event, Update):
                place = {
                    "step": event.step,
                    "rank": event.rank,
                    "scenario": trace.scenario.to_dict(),
                }
                _rate(tally, trace.scenario, event, relative, place)
                _clipping(tally, trace.scenario, event, relative, place)
                if event.rank in rules:
                    num_moved += _moved(tally, trace.scenario, rules[event.rank], event, place)
        if trace.of(Update) and not num_moved and (gaps := _gaps(trace)):
            tally.miss(f"no step could be recomputed: {gaps}")
    return tally.finding(
        nothing="no step was recorded: record a Start and Updates for every rank, weights and "
        f"gradient {missing.WITH_VALUES}"
    )


def _gaps(trace: Trace) -> str:
    """What the first update and the start before it lack for a step to be recomputed.

    Empty if that is the norms alone, which `_clipping` asks for.
    """
    update, scenario = trace.of(Update)[0], trace.scenario
    start = next((one for one in trace.of(Start) if one.rank == update.rank), None)
    if start is None:
        return f"record a Start of rank {update.rank}, weights {missing.WITH_VALUES}"
    parts = {
        "Start.weights": start.weights,
        "Update.weights": update.weights,
        "Update.gradient": update.gradient,
    }
    bare = [name for name, tensors in parts.items() if evidence.vectors(tensors) is None]
    if bare:
        return f"record {' and '.join(bare)} {missing.WITH_VALUES}"
    if scenario.clip_norm is not None and None in (update.grad_norm, update.applied_norm):
        return ""
    if scenario.weight_decay and start.decayed is None:
        return f"weight_decay={scenario.weight_decay}: record Start.decayed, the tensors it acts on"
    if start.step:
        return f"{scenario.optimizer} has state: record the run from step 0 on"
    return "record weights and gradient of the same names and sizes, and finite=True where they are"


def expected_rate(scenario: Scenario, step: int) -> float:
    """The closed form of the scenario's schedule, written independently of the trainer's.

    A trainer of one's own with another schedule says so: `options: {schedule: other}`.
    """
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


def _rate(
    tally: Tally, scenario: Scenario, update: Update, relative: float, place: Mapping[str, Any]
) -> None:
    if scenario.options.get("schedule") == "other":
        tally.miss(
            "the schedule is not one that is known here (options: schedule: other): the learning "
            "rate was not judged"
        )
        return
    expected = expected_rate(scenario, update.step)
    tally.check(
        abs(update.learning_rate - expected) <= relative * scenario.learning_rate,
        f"learning rate of step {update.step} is not the {scenario.schedule} schedule's",
        expected=repr(expected),
        got=repr(update.learning_rate),
        **place,
    )


def _clipping(
    tally: Tally, scenario: Scenario, update: Update, relative: float, place: Mapping[str, Any]
) -> None:
    if update.grad_norm is None or update.applied_norm is None:
        if scenario.clip_norm is not None:
            tally.miss(
                f"clip_norm={scenario.clip_norm}, and the norms before and after clipping were not "
                "recorded: record Update.grad_norm and Update.applied_norm"
            )
        return
    if not (math.isfinite(update.grad_norm) and math.isfinite(update.applied_norm)):
        return  # for F-DP-003 to judge
    norm = evidence.norm_l2(update.gradient)
    if norm is not None:
        tally.check(
            abs(update.grad_norm - norm) <= relative * norm,
            "the norm is not that of the averaged gradient",
            expected=repr(norm),
            got=repr(update.grad_norm),
            **place,
        )
    limit = math.inf if scenario.clip_norm is None else scenario.clip_norm
    expected = min(update.grad_norm, limit)
    if update.grad_norm > limit:
        relative += CLIP_EPSILON / update.grad_norm
    tally.check(
        abs(update.applied_norm - expected) <= relative * expected,
        f"the applied gradient's norm is not min(norm, {scenario.clip_norm})",
        expected=repr(expected),
        got=repr(update.applied_norm),
        **place,
    )


def _moved(
    tally: Tally,
    scenario: Scenario,
    rule: update_rule.Rule,
    update: Update,
    place: Mapping[str, Any],
) -> int:
    """Each tensor moved as the optimizer's formula says, element by element; how many could be
    compared.
    """
    num_compared = 0
    roundings = UPDATE_ULPS + (0 if scenario.optimizer == "sgd" else update.step)
    for name, expected in rule.step(update):
        record = update.weights.get(name)
        after = None if record is None else record.values()
        if after is None or after.shape != expected.weight.shape or not after.size:
            continue
        # inf - inf and the like: a NaN, which is no gap that is allowed.
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = roundings * 2.0**-24 * (np.abs(expected.weight) + expected.moved)
            gap = np.abs(after - expected.weight) - allowed
        element = int(gap.argmax())
        tally.check(
            bool((gap <= 0).all()),
            f"{name} did not move by learning rate times clipped gradient, as {scenario.optimizer} "
            "has it",
            tensor=name,
            element=element,
            expected=repr(float(expected.weight[element])),
            got=repr(float(after[element])),
            **place,
        )
        num_compared += 1
    return num_compared
