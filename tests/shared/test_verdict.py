"""Verdicts, counterexamples, findings, and how a tally becomes a finding."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.verdict import Counterexample, Finding, Tally, Verdict, inconclusive, worst

verdicts = st.lists(st.sampled_from(Verdict))
counterexamples = st.builds(
    Counterexample,
    message=st.text(),
    step=st.none() | st.integers(-1, 9),
    rank=st.none() | st.integers(0, 9),
    tensor=st.none() | st.text(),
    sample_ids=st.lists(st.integers(0, 99)).map(tuple),
    expected=st.none() | st.text(),
    scenario=st.none() | st.dictionaries(st.text(), st.integers() | st.text()),
)
findings = st.builds(
    Finding,
    invariant=st.text(),
    verdict=st.sampled_from(Verdict),
    compared=st.integers(0),
    reason=st.text(),
    counterexample=st.none() | counterexamples,
    notes=st.lists(st.text()).map(tuple),
    vacuous=st.booleans(),
)


def test_falsified_is_worse_than_inconclusive_is_worse_than_held() -> None:
    """The three verdicts are ordered."""
    assert [v.badness for v in (Verdict.HELD, Verdict.INCONCLUSIVE, Verdict.FALSIFIED)] == [0, 1, 2]


def test_no_verdict_at_all_is_inconclusive() -> None:
    """Without any comparison the verdict is inconclusive."""
    assert worst([]) is Verdict.INCONCLUSIVE


@given(verdicts, verdicts)
def test_worst_is_a_join(some: list[Verdict], more: list[Verdict]) -> None:
    """Order and grouping don't matter, and adding verdicts never improves the result."""
    if not some or not more:
        return
    together = worst(some + more)
    assert together == worst(more + some) == worst([worst(some), worst(more)])
    assert together.badness >= worst(some).badness
    assert together in some + more


@given(findings)
def test_a_finding_survives_json(finding: Finding) -> None:
    """to_dict, JSON, from_dict: the same finding."""
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "perhaps"}, "verdict='perhaps': use one of held, inconclusive, falsified"),
        ({"colour": "red"}, "key='colour': allowed are invariant, verdict, compared, "),
        ({"counterexample": 5}, "counterexample 5: use a mapping of message, ..."),
        ({"counterexample": {"rank": 1}}, "counterexample without message: add what is missing"),
        ({"notes": 3}, "finding notes=3: use a list"),
        ({"compared": "3"}, "finding compared='3': use a whole number of at most 63 bits"),
    ],
)
def test_what_is_no_finding_is_refused(changes: dict[str, Any], message: str) -> None:
    """A record that was edited by hand gives one clear error."""
    with pytest.raises(UsageError) as caught:
        Finding.from_dict({"invariant": "F", "verdict": "held", "compared": 1} | changes)
    assert message in str(caught.value)


def test_a_place_names_what_is_known() -> None:
    """Only known fields are shown, and long lists of samples are cut."""
    assert Counterexample(message="m").place() == ""
    found = Counterexample(message="m", step=3, rank=1, shard=2, tensor="w", element=7)
    assert found.place() == "step 3, rank 1, shard 2, tensor w[7]"
    assert Counterexample(message="m", tensor="w").place() == "tensor w"
    initial = Counterexample(message="m", step=-1, rank=1)
    assert initial.place() == "before the first step, rank 1"
    shown = Counterexample(message="m", step=0, sample_ids=tuple(range(9))).place()
    assert shown == "step 0, samples 0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_a_tally_of_nothing_is_inconclusive() -> None:
    """The reason is the one that the judge gives."""
    finding = Tally("F-DP-001").finding(nothing="no updates")
    assert (finding.verdict, finding.reason, finding.compared) == (
        Verdict.INCONCLUSIVE,
        "no updates",
        0,
    )
    assert finding.vacuous


def test_one_comparison_that_holds_is_enough() -> None:
    """HELD has no reason and no counterexample, and keeps each note once."""
    tally = Tally("F-DP-001")
    assert tally.equal(1, 1, "differs")
    tally.note("software adapter")
    tally.note("software adapter")
    finding = tally.finding(nothing="")
    assert finding == Finding(
        invariant="F-DP-001", verdict=Verdict.HELD, compared=1, notes=("software adapter",)
    )


def test_what_is_missing_forbids_held() -> None:
    """Many comparisons that hold don't outweigh one that couldn't be made."""
    tally = Tally("F-DP-001")
    tally.check(True, "m")
    for reason in ("a", "a", "b", "c", "d"):
        tally.miss(reason)
    finding = tally.finding(nothing="")
    assert not finding.vacuous
    assert (finding.verdict, finding.reason) == (Verdict.INCONCLUSIVE, "a; b; c; and 1 more")


def test_a_break_outweighs_what_is_missing() -> None:
    """A counterexample falsifies, even if other comparisons are missing."""
    tally = Tally("F-DP-001")
    tally.miss("a")
    assert not tally.equal("1", 2, "differs", step=4, rank=1)
    finding = tally.finding(nothing="")
    assert (finding.verdict, finding.reason, finding.compared) == (Verdict.FALSIFIED, "differs", 1)
    assert finding.counterexample == Counterexample(
        message="differs", step=4, rank=1, expected="1", got="2"
    )


@pytest.mark.parametrize("steps", list(permutations([None, -1, 3])))
def test_the_earliest_break_is_kept(steps: tuple[int | None, ...]) -> None:
    """Step -1, the state before the first step, is the earliest; no step at all is the last."""
    tally = Tally("F-DP-001")
    for step in steps:
        tally.check(False, "m", step=step)
    assert tally.broken is not None
    assert (tally.broken.step, tally.compared) == (-1, 3)


def test_of_two_breaks_in_one_step_the_first_is_kept() -> None:
    """The judge's order decides."""
    tally = Tally("F-DP-001")
    tally.check(False, "first", step=1)
    tally.check(False, "second", step=1)
    assert tally.finding(nothing="").reason == "first"


def test_inconclusive_says_why() -> None:
    """`inconclusive` makes a finding with a reason and without evidence."""
    finding = inconclusive("F-DP-004", "no device", compared=2)
    assert (finding.verdict, finding.reason, finding.compared) == (
        Verdict.INCONCLUSIVE,
        "no device",
        2,
    )


@pytest.mark.parametrize(
    ("expected", "got", "holds"),
    [
        (1.0, 1.5, True),
        (1.0, 1.75, False),
        (float("inf"), float("inf"), True),
        (float("inf"), float("-inf"), False),
        (float("nan"), float("nan"), False),
    ],
)
def test_close_numbers(expected: float, got: float, holds: bool) -> None:
    """A difference within the tolerance holds, and so does an infinity that is expected."""
    tally = Tally("F-X-001")
    assert tally.close(expected, got, 0.5, "far apart") is holds
    assert (tally.broken is None) is holds
