"""The learning rates of two updates, tensor by tensor, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from entrenar_py.check.evidence import evidence, factors
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace, Update
from entrenar_py.shared.verdict import Tally

BOUND = 1e-6  # relative: a rate is the product of a few float64 numbers
Rates = dict[str | None, tuple[float, float]]


def of(model: Update, update: Update) -> Rates:
    """Return the rates of both updates: under None the first parameter group's, then by tensor.

    Tensors are those in other groups than the first. A tensor that a rank's own optimizer does not
    step (another rank's does) has no rate there, and is left out.
    """
    rates: Rates = {None: (model.learning_rate, update.learning_rate)}
    names = dict.fromkeys((*model.rates, *update.rates))
    stepped = [_stepped(one) for one in (model, update)] if names else []
    for name in names:
        own = (model.rates, stepped[0]), (update.rates, stepped[1])
        if all(name in given or not held or name in held for given, held in own):
            rates[name] = model.rate_of(name), update.rate_of(name)
    return rates


def differ(model: Update, update: Update) -> tuple[str | None, float, float] | None:
    """Return the first tensor (or None) whose rates differ, with both; None if none does."""
    return next((((n, *pair)) for n, pair in of(model, update).items() if pair[0] != pair[1]), None)


def is_lost_place(straight: Trace, resumed: Trace) -> bool:
    """Return whether a schedule is elsewhere after a resume, while all rates are still the same.

    A rate that the optimizer's state brought back stays until the schedule moves.
    """
    expected, elsewhere = evidence.updates(straight), False
    for step, by_rank in evidence.ranks_by_step(resumed):
        for rank, update in by_rank.items():
            if (model := expected.get(step, {}).get(rank)) is None:
                continue
            if differ(model, update) is not None:
                return False
            elsewhere |= None not in (model.schedule, update.schedule) and (
                model.schedule != update.schedule
            )
    return elsewhere


def only_step(
    name: str | None, rate: float, updates: Mapping[int, Mapping[int, Update]]
) -> int | None:
    """Return the only step with this rate of tensor `name` (None: of the first group), or None."""
    steps = []
    for step, by_rank in updates.items():
        model = evidence.any_rank(by_rank)
        known = model.learning_rate if name is None else model.rate_of(name)
        if math.isclose(rate, known, rel_tol=BOUND):
            steps.append(step)
    return steps[0] if len(steps) == 1 else None


def compare(
    tally: Tally,
    model: Update,
    update: Update,
    expected: Mapping[int, Mapping[int, Update]],
    trace: Trace,
    message: str,
) -> None:
    """Compare the rates of one step, even of a schedule whose closed form is unknown.

    `expected` are all updates of the run of `model`, `trace` is the run of `update`.
    """
    for name, (due, got) in of(model, update).items():
        right = math.isclose(due, got, rel_tol=BOUND)
        words = "" if right else _relation(name, due, got, update.step, expected, trace.scenario)
        tally.check(
            right,
            f"{message}{words}",
            tensor=name,
            expected=repr(due),
            got=repr(got),
            **evidence.place(trace, update),
        )


def _relation(
    name: str | None,
    due: float,
    got: float,
    step: int,
    expected: Mapping[int, Mapping[int, Update]],
    scenario: Scenario,
) -> str:
    """Return in words which other step has a wrong rate, or its factor; "" if neither is known."""
    other = only_step(name, got, expected)
    if other is not None and other != step:
        counts = {"worker": scenario.world_size, "micro-batch": scenario.accumulation}
        for_each = [what for what, count in counts.items() if count > 1 and other == step * count]
        moved = f", as if the schedule moved once for each {for_each[0]}" if for_each else ""
        return f": it is that of step {other}{moved}"
    words = factors.of(np.array([due]), np.array([got]), scenario)
    return f": {words}" if words else ""


def _stepped(update: Update) -> set[str]:
    """Return the tensors of which the rank's optimizer has state."""
    return {key.rpartition("/")[0] for key in update.optimizer}
