"""What a resume restores is compared with the state before the stop, and named."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.check.clauses.replicas import judge_state
from entrenar_py.check.evidence.needs import SAVED, Runs
from entrenar_py.shared.trace import Event, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import clause, scenario, values

SUBJECT = scenario(system="command", workload="own", world_size=1, num_steps=2)
MOMENTS = {"a/m": values(1.0, 2.001), "b/m": values(3.0, 4.0)}
MOVED = {"a/m": values(5.0, 6.0), "b/m": values(7.0, 8.0)}


def update(step: int, optimizer: Tensors) -> Update:
    """Return an update with this state of the optimizer."""
    return Update(
        step=step,
        rank=0,
        loss=1.0,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights={"a": values(step), "b": values(step)},
        optimizer=optimizer,
    )


def stopped(restored: Tensors, after: Tensors, held: Tensors = MOMENTS) -> Trace:
    """Return a run that stopped with `held`, resumed with `restored` and had `after` later."""
    events: list[Event] = [
        Start(step=0, rank=0, weights={}, optimizer={"a/m": values(0.5, 0.5)}),
        update(0, held),
        Start(step=1, rank=0, weights={}, optimizer=restored, resumed=True),
        update(1, after),
    ]
    return traces.hand_written(*events, subject=SUBJECT.with_(stops=(1,)))


STRAIGHT = traces.hand_written(
    Start(step=0, rank=0, weights={}), update(0, MOMENTS), update(1, MOVED), subject=SUBJECT
)


def judged(trace: Trace) -> Finding:
    """Return the finding of F-TI-002 on a stopped run."""
    return judge_state(clause("optimizer_state"), Runs(STRAIGHT, {SAVED: (trace,)}))


def test_what_was_restored_is_held() -> None:
    """The state before the stop, bit for bit."""
    finding = judged(stopped(MOMENTS, MOVED))
    assert finding.verdict is Verdict.HELD
    assert finding.compared == len(MOMENTS)


@pytest.mark.parametrize(
    ("restored", "tensor", "words"),
    [
        ({}, "a/m", "it has none, so none was loaded"),
        ({"a/m": MOMENTS["a/m"]}, "b/m", "b/m is not there any more"),
        ({**MOMENTS, "a/m": values(0.0, 0.0)}, "a/m", "is zero: it was not restored"),
        ({**MOMENTS, "a/m": values(1.0, 2.0)}, "a/m", "was rounded to bfloat16"),
        ({**MOMENTS, "a/m": values(1.0, 2.5)}, "a/m", "a/m differs"),
        ({**MOMENTS, "a/m": values(0.5, 0.5)}, "a/m", "a/m is as it was before the first step"),
        (
            {"a/m": MOMENTS["b/m"], "b/m": MOMENTS["a/m"]},
            "a/m",
            "has what b/m had: restored in another order",
        ),
    ],
)
def test_what_was_lost_is_named(restored: dict[str, Any], tensor: str, words: str) -> None:
    """The tensor, and what became of it."""
    found = traces.broken(judged(stopped(restored, MOMENTS)))
    assert (found.step, found.rank, found.tensor) == (1, 0, tensor)
    assert words in found.message


def test_a_state_of_another_kind_is_no_other_order() -> None:
    """AMSGrad's `max_exp_avg_sq` is no `exp_avg_sq` of another tensor, though its name ends so."""
    squares, largest = values(1.0, 2.0), values(3.0, 5.0)
    held = {"a/exp_avg_sq": squares, "a/max_exp_avg_sq": largest}
    found = traces.broken(judged(stopped({**held, "a/exp_avg_sq": largest}, MOMENTS, held)))
    assert found.tensor == "a/exp_avg_sq"
    assert "another order" not in found.message


def test_a_state_that_the_script_changes_between_steps() -> None:
    """A difference that the next step doesn't have was made in the run without stops, too."""
    reset = {"a/m": values(0.5, 0.5), "b/m": values(0.5, 0.5)}
    assert judged(stopped(reset, MOVED)).verdict is not Verdict.FALSIFIED
