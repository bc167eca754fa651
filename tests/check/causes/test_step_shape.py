"""Optimizers of an unknown rule: those whose steps are proportional to the gradient, and others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.causes import run_comparison, step_shape
from entrenar_py.shared.trace import Trace
from tests.check.clauses import traces
from tests.check.clauses.traces import scenario


def unknown(optimizer: str, **changes: object) -> Trace:
    """Return a user's run whose optimizer is not told, but for its steps."""
    run = traces.run(scenario(detail="values", clip_norm=None, optimizer=optimizer, **changes))
    subject = run.scenario.with_(system="mine", workload="own", optimizer="momentum")
    return traces.was(replace(run, scenario=subject, promises=()), rule="other")


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("optimizer", "due"), [("sgd", False), ("momentum", False), ("adamw", 1)])
def test_steps_out_of_proportion(optimizer: str, due: bool, decay: float) -> None:
    """Adam's steps are told from those of SGD, with weight decay and without."""
    run = unknown(optimizer, weight_decay=decay)
    assert step_shape.is_adaptive(run) is bool(due)
    assert run_comparison.Bounds.of({}, run).adam is bool(due)


def test_a_known_rule_is_not_looked_at() -> None:
    """Only a user's optimizer of an unknown rule is adaptive by its steps; without values too."""
    run = unknown("adamw")
    assert not step_shape.is_adaptive(traces.was(run, rule="known"))
    assert not step_shape.is_adaptive(run, unknown("sgd"))
    assert step_shape.is_adaptive(replace(run, events=run.events[-1:]))
