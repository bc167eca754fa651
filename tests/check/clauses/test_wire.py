"""F-WP-001 to F-WP-004: the judges' findings on right, wrong and missing facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses import CHECKS, wire
from entrenar_py.shared.faults import STRANGERS
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Carried, Event, Refused, Trace
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.clauses import traces

SUBJECT = Scenario(system="wire", workload="linear", world_size=1, seed=0)
CARRIED = Carried(
    message="TreeNode", payload_bytes=8, pieces=3, sent="aa", got="aa", allocated_bytes=100
)
REFUSED = Refused(
    case="magic", error="ProtocolError", claimed_bytes=2**62, allocated_bytes=2 * 2**20
)
WELCOME = Admission(case="right", entitled=True, let_in=True, answer="")
TURNED_AWAY = Admission(case="wrong secret", entitled=False, let_in=False, answer="Refuse")


def judged(check: str, *events: Event) -> Finding:
    """Return the finding of `check` on a probe that recorded `events`."""
    return traces.judge(check, [traces.hand_written(*events, subject=SUBJECT)])


@pytest.mark.parametrize(
    ("check", "event"),
    [
        ("wire_round_trip", CARRIED),
        ("wire_refusal", REFUSED),
        ("wire_memory", CARRIED),
        ("wire_memory", REFUSED),
        ("wire_memory", replace(CARRIED, allocated_bytes=8 + wire.BESIDE_BYTES)),
        ("admission", WELCOME),
        ("admission", TURNED_AWAY),
    ],
)
def test_right(check: str, event: Event) -> None:
    """A correct result holds, with one comparison each."""
    finding = judged(check, event)
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 1)


@pytest.mark.parametrize(
    ("check", "event", "place", "said"),
    [
        ("wire_round_trip", replace(CARRIED, got="bb"), "TreeNode", "is not what was sent"),
        ("wire_round_trip", replace(CARRIED, got=None), "TreeNode", "in 3 pieces"),
        ("wire_refusal", replace(REFUSED, error=None), "magic", "magic gave a message"),
        ("wire_refusal", replace(REFUSED, error="KeyError"), "magic", "magic gave KeyError"),
        ("wire_memory", replace(CARRIED, allocated_bytes=2**26), "TreeNode", "took 67108864"),
        ("wire_memory", replace(REFUSED, allocated_bytes=2**26), "magic", "refusing magic took"),
        ("admission", replace(WELCOME, let_in=False), "right", "right: was turned away"),
        ("admission", replace(TURNED_AWAY, let_in=True), "wrong secret", "was let in"),
    ],
)
def test_wrong(check: str, event: Event, place: str, said: str) -> None:
    """A wrong result is falsified, and the case is named."""
    finding = judged(check, event)
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    assert finding.counterexample.tensor == place
    assert said in finding.reason


@pytest.mark.parametrize("check", ["wire_round_trip", "wire_refusal", "wire_memory", "admission"])
def test_the_real_wire_holds(check: str) -> None:
    """The probe's plan holds: every message, and many cases that differ by seed."""
    runs: list[Trace] = [traces.run(one) for one in CHECKS[check].plan(traces.clause(check))]
    finding = traces.judge(check, runs)
    assert finding.verdict is Verdict.HELD, finding.reason
    assert finding.compared >= 36
    probes = [one for one in runs if one.scenario.system == "wire"]
    assert len({str(one.of(Refused)) for one in probes}) == len(probes) == 3


def test_strangers_come_to_a_training() -> None:
    """One connection of each forbidden kind is refused."""
    (visited,) = [
        one for one in wire.plan_admission(traces.clause("admission")) if one.system != "wire"
    ]
    seen = traces.run(visited).of(Admission)
    assert [one.case for one in seen] == list(STRANGERS)
    assert not any(one.entitled or one.let_in for one in seen)
