"""F-WP-007: the judge's findings on what workers of the original system heard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Heard
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

SCENARIO = Scenario(
    system="averaging",
    workload="linear",
    world_size=3,
    num_shards=3,
    seed=0,
    num_samples=23,
    batch_size=10,
    num_steps=2,
)
ORDERED = Heard(
    case="in order",
    step=1,
    part="block 0",
    digest="a",
    poisoned=False,
    roundings=0.5,
    element=3,
)
BACKWARDS = replace(ORDERED, case="backwards")
POISONED = replace(ORDERED, case="a NaN", poisoned=True, digest=None, roundings=None, element=None)


def judge(*events: Heard) -> Finding:
    return traces.judge("averages", [traces.hand_written(*events, subject=SCENARIO)])


def test_held() -> None:
    """Right averages with the same bits, and none of a NaN."""
    finding = judge(ORDERED, BACKWARDS, POISONED)
    assert finding.verdict is Verdict.HELD
    assert finding.compared == 7


@pytest.mark.parametrize(
    ("wrong", "case", "said"),
    [
        (replace(BACKWARDS, digest="b"), "backwards", "has other bits than with in order"),
        (replace(BACKWARDS, roundings=1.5), "backwards", "is not the weighted mean"),
        (
            replace(BACKWARDS, digest="different", roundings=None, element=None),
            "backwards",
            "was not heard alike",
        ),
        (
            replace(BACKWARDS, digest=None, roundings=None, element=None),
            "backwards",
            "was not heard alike",
        ),
        (replace(POISONED, digest="c"), "a NaN", "was sent, though a term is a NaN"),
    ],
)
def test_falsified(wrong: Heard, case: str, said: str) -> None:
    """The finding names the schedule and the step."""
    finding = judge(ORDERED, wrong)
    assert finding.verdict is Verdict.FALSIFIED
    assert said in finding.reason
    assert finding.counterexample is not None
    assert (finding.counterexample.tensor, finding.counterexample.step) == (case, 1)


def test_inconclusive() -> None:
    """A run in which nothing was averaged shows nothing."""
    assert judge().verdict is Verdict.INCONCLUSIVE
