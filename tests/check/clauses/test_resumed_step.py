"""The first step after a resume differs, though all that is recorded was restored."""

from __future__ import annotations

import math

import pytest

from entrenar_py.check.clauses import resume
from entrenar_py.shared.trace import Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Tally
from tests.check.clauses import traces
from tests.check.clauses.traces import scenario, values

SUBJECT = scenario(system="command", workload="own", world_size=1, num_steps=2)
BEGUN = {"a": values(0.0, 1.0), "b": values(1.0, 0.0)}
TRAINED = {"a": values(5.0, 9.0), "b": values(9.0, 5.0)}
NEXT = {"a": values(5.5, 9.5), "b": values(9.5, 5.5)}
WENT_BACK = "it went back to nearly what it was before the first step"
OTHER_CONSTANTS = "what the optimizer was made with"


def update(step: int, weights: Tensors) -> Update:
    """Return an update that ends with `weights`; its gradient is always the same."""
    return Update(
        step=step,
        rank=0,
        loss=1.0,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights=weights,
        gradient={"a": values(1.0, 1.0)},
    )


def resumed(after: Tensors, *, begun: Tensors = BEGUN, held: Tensors = TRAINED) -> Trace:
    """Return a run that begins with `begun`, resumes with `held` and then has weights `after`."""
    return traces.hand_written(
        Start(step=0, rank=0, weights=begun),
        update(0, held),
        Start(step=1, rank=0, weights=held, resumed=True),
        update(1, after),
        subject=SUBJECT.with_(stops=(1,)),
    )


STRAIGHT = traces.hand_written(
    Start(step=0, rank=0, weights=BEGUN), update(0, TRAINED), update(1, NEXT), subject=SUBJECT
)


def found(trace: Trace) -> Counterexample:
    """Return the counterexample of the first step after the resume."""
    tally = Tally("")
    resume.compare_first_steps(tally, STRAIGHT, trace)
    assert tally.broken is not None
    return tally.broken


def test_weights_that_went_back() -> None:
    """Weights nearer to the beginning than to the checkpoint came from copies of the former."""
    back = {"a": values(0.1, 1.1), "b": values(1.1, 0.1)}
    assert WENT_BACK in found(resumed(back)).message
    assert OTHER_CONSTANTS in found(resumed({"a": values(5.4, 9.4), "b": NEXT["b"]})).message


def test_a_tensor_is_not_compared_with_another_of_its_place() -> None:
    """Values that `a` has come from `a`, also where the records are in another order."""
    begun = {"b": values(8.0, 7.0), "a": values(0.0, 0.0)}
    held = {"a": values(7.0, 7.0), "b": values(0.0, 0.0)}
    after = {"a": values(8.0, 7.0), "b": values(0.0, 0.0)}
    assert OTHER_CONSTANTS in found(resumed(after, begun=begun, held=held)).message


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({**NEXT, "a": values(5.4, 9.4), "c": values(1.0)}, id="one more"),
        pytest.param({"a": values(5.4, 9.4)}, id="one less"),
        pytest.param({"a": values(5.5), "b": values(9.5, 5.5, 1.0)}, id="other sizes"),
        pytest.param({"a": values(math.nan, 9.5), "b": NEXT["b"]}, id="not a number"),
    ],
)
def test_tensors_that_say_nothing_about_the_cause(after: Tensors) -> None:
    """With other tensors, other sizes or a NaN both causes are possible."""
    assert OTHER_CONSTANTS in found(resumed(after)).message


def test_a_tensor_that_the_next_step_lacks() -> None:
    """Weights of other tensors than those that were restored can't be held against them."""
    after = {"a": values(5.4, 9.4), "b": NEXT["b"]}
    assert OTHER_CONSTANTS in found(resumed(after, held={**TRAINED, "c": values(1.0)})).message
