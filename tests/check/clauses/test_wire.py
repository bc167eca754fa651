"""Messages, faults and averages of the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS, wire
from entrenar_py.shared.faults import LIES, ON_THE_WAY, STRANGERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Admission,
    Carried,
    End,
    Event,
    Heard,
    Refused,
    TensorRecord,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import held

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
        ("wire_round_trip", replace(CARRIED, got="bb"), "TreeNode", "differs from the sent one"),
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
    finding = held(check, *runs)
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


CALM = Scenario(
    system="parameter_server_simulated", workload="linear", world_size=2, seed=0, num_steps=3
)
CUT = CALM.with_(faults=(Fault(kind="cut", rank=1, step=1, at="TreeNode"),))


def judged_endurance(*runs: Trace) -> tuple[Verdict, str]:
    finding = traces.judge("endurance", list(runs))
    return finding.verdict, finding.reason


def test_a_disturbed_run_that_ends_alike_holds() -> None:
    """Every update of the disturbed run is compared."""
    finding = held("endurance", *traces.family("endurance", CUT))
    assert finding.compared > 6


def test_other_weights() -> None:
    """The first update that differs is named."""
    cut, calm = traces.run(CUT), traces.run(CALM)
    update = cut.of(Update)[-1]
    wrong = replace(update, weights={**update.weights, "bias": TensorRecord("0" * 32)})
    events = tuple(wrong if one is update else one for one in cut.events)
    finding = traces.judge("endurance", [replace(cut, events=events), calm])
    assert finding.verdict is Verdict.FALSIFIED
    assert finding.counterexample is not None
    place: dict[str, Any] = {"step": 2, "rank": update.rank, "tensor": "bias"}
    assert {name: getattr(finding.counterexample, name) for name in place} == place


def test_a_run_that_does_not_end_right() -> None:
    """A run that began and then failed, or lost a step, is falsified."""
    cut, calm = traces.run(CUT), traces.run(CALM)
    gave_up = replace(cut, events=(*cut.events[:-1], End(status="failed", reason="no workers")))
    verdict, reason = judged_endurance(gave_up, calm)
    assert verdict is Verdict.FALSIFIED
    assert "the run ended failed (no workers), the undisturbed run ended completed" in reason
    kept = tuple(one for one in cut.events if not (isinstance(one, Update) and one.step == 1))
    assert judged_endurance(replace(cut, events=kept), calm)[1] == "steps [1] were never made"


def test_what_could_not_be_run_or_compared() -> None:
    """A run that never began, has no model, or promises no bits is inconclusive."""
    cut, calm = traces.run(CUT), traces.run(CALM)
    never = replace(cut, events=(End(status="failed", reason="no such backend"),))
    assert judged_endurance(never, calm)[0] is Verdict.INCONCLUSIVE
    assert "no such backend" in judged_endurance(never, calm)[1]
    assert "no undisturbed run" in judged_endurance(cut)[1]
    assert "promises no bits" in judged_endurance(replace(cut, promises=()), calm)[1]
    assert judged_endurance(calm)[1].startswith(
        "no run had a planned fault: F-WP-005 is decided by a probe"
    )


def test_the_plan_tries_everything() -> None:
    """The plan has every kind of fault, and several in one run."""
    plan = wire.plan_faults(traces.clause("endurance"))
    kinds = {fault.kind for one in plan for fault in one.faults}
    assert kinds == {"restart", "lie", "stranger", *ON_THE_WAY}
    assert {fault.value for one in plan for fault in one.faults} == {*LIES, *STRANGERS, None}
    assert max(len(one.faults) for one in plan) >= 5


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
    case="in order", step=1, part="block 0", digest="a", poisoned=False, roundings=0.5, element=3
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
        (replace(BACKWARDS, digest="b"), "backwards", "has different bits than with in order"),
        (replace(BACKWARDS, roundings=1.5), "backwards", "is not the weighted mean"),
        (
            replace(BACKWARDS, digest="different", roundings=None, element=None),
            "backwards",
            "was not the same for all workers",
        ),
        (
            replace(BACKWARDS, digest=None, roundings=None, element=None),
            "backwards",
            "was not the same for all workers",
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
