"""What rounding makes of a training, and how much two runs of it may differ then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.causes import rounding_bounds, run_comparison
from entrenar_py.check.causes.rounding_bounds import CHAOTIC, MARGIN, UNKNOWN, Sensitivity
from entrenar_py.check.evidence import precision
from entrenar_py.check.evidence.needs import NUDGED, Runs
from entrenar_py.shared.trace import Trace, Update, record_tensor
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.traces import scenario

PLAIN = traces.run(traces.scenario(detail="values"))
BOUND = rounding_bounds.GRADIENT_BOUND


def moved(by: Sequence[float], trace: Trace = PLAIN) -> Trace:
    """Return `trace` with the gradient of each step moved by a share of its norm."""
    for step, share in enumerate(by):
        if not share:
            continue
        gradient = {}
        for name, record in traces.one(trace, Update, step=step).gradient.items():
            value = record.values()
            assert value is not None
            off = np.zeros_like(value)
            off.flat[0] = share * np.linalg.norm(value)
            gradient[name] = record_tensor(value + off, values=True)
        trace = traces.altered(trace, Update, {"step": step}, gradient=gradient)
    return trace


def measured(*by: float) -> Sensitivity:
    """Return what a nudged run shows whose gradients are moved by these shares."""
    return rounding_bounds.sensitivity_of(Runs(PLAIN, witnesses={NUDGED: (PLAIN, moved(by))}))


def compared(shown: Sensitivity, *by: float) -> Tally:
    """Return the comparison of a run whose gradients are moved by these shares with the plain."""
    tally = Tally("F-DP-005", observed=True)
    run_comparison.compare(tally, moved([0.0] * len(by)), moved(by), None, sensitivity=shown)
    return tally


def test_a_run_that_nobody_nudged() -> None:
    """Nothing more is allowed than by the bound."""
    assert rounding_bounds.sensitivity_of(Runs(PLAIN)) == UNKNOWN
    assert UNKNOWN.allowed("gradient", 3, BOUND) == BOUND
    assert not UNKNOWN.is_chaotic(5)
    assert UNKNOWN.in_words(4, BOUND) == ""


def test_a_difference_that_rounding_makes_is_none() -> None:
    """Later steps allow what earlier ones did; MARGIN times what was measured is the most."""
    shown = measured(0.0, 2e-3)
    most = shown.allowed("gradient", 1, BOUND)
    assert most == pytest.approx(MARGIN * 2e-3, rel=0.5)  # small tensors count for less
    assert compared(shown, 0.0, most / 4, most / 4).broken is None
    assert compared(UNKNOWN, 0.0, most / 4, most / 4).broken is not None
    (note,) = compared(shown, 0.0, most / 4).notes
    assert "rounding alone moves the gradients of the first 4 steps by up to 0.00" in note


@pytest.mark.parametrize("by", [(1e-3, 0.0), (0.0, 0.5)])
def test_a_larger_difference_is_found(by: tuple[float, float]) -> None:
    """What rounding does in step 1 excuses nothing in step 0."""
    assert compared(measured(0.0, 2e-3), *by).broken is not None


def test_where_rounding_decides_nothing_is_compared() -> None:
    """The steps before stand, and a note names the first that was left out."""
    shown = measured(1e-5, 2 * CHAOTIC, 3.0)
    tally = compared(shown, 0.0, 1.0, 5.0)
    assert tally.broken is None
    assert not tally.missing
    assert "moves the gradients of step 1 by 20%" in tally.notes[0]
    assert compared(shown, 1e-3, 1.0).broken is not None


def test_without_any_step_the_comparison_is_missing() -> None:
    """A training that no two runs repeat within rounding can't be compared at all."""
    tally = compared(measured(1.0), 0.0, 0.0)
    assert tally.broken is None
    assert "not compared from there on" in tally.missing[0]


def test_only_a_small_difference_may_be_rounding() -> None:
    """A first gradient that is twice too large needs no further run; a later one may."""
    zeros = moved([0.0, 0.0])
    assert not rounding_bounds.may_be_rounding(zeros, moved([1.0, 0.0]))
    assert rounding_bounds.may_be_rounding(zeros, moved([1e-3, 0.0]))
    assert rounding_bounds.may_be_rounding(zeros, moved([0.0, 1.0]))


def test_the_size_of_a_nudge() -> None:
    """It is some roundings of the arithmetic in which the training computes."""
    assert rounding_bounds.nudge(PLAIN) == 256 * precision.FLOAT32


# --- step shape -----------------------------------------------------------------------------------
# Optimizers of an unknown rule: those whose steps are proportional to the gradient, and others.


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
    assert rounding_bounds.is_adaptive(run) is bool(due)
    assert rounding_bounds.Bounds.of({}, run).adam is bool(due)


def test_a_known_rule_is_not_looked_at() -> None:
    """Only a user's optimizer of an unknown rule is adaptive by its steps; without values too."""
    run = unknown("adamw")
    assert not rounding_bounds.is_adaptive(traces.was(run, rule="known"))
    assert not rounding_bounds.is_adaptive(run, unknown("sgd"))
    assert rounding_bounds.is_adaptive(replace(run, events=run.events[-1:]))
