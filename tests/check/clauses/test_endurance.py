"""F-WP-005: the judge's findings on runs with faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrenar_py.check.clauses import wire
from entrenar_py.shared.faults import LIES, ON_THE_WAY, STRANGERS, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, TensorRecord, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces

CALM = Scenario(
    system="parameter_server_simulated", workload="linear", world_size=2, seed=0, num_steps=3
)
CUT = CALM.with_(faults=(Fault(kind="cut", rank=1, step=1, at="TreeNode"),))


def judged(*runs: Trace) -> tuple[Verdict, str]:
    """Return verdict and reason."""
    finding = traces.judge("endurance", list(runs))
    return finding.verdict, finding.reason


def test_a_disturbed_run_that_ends_alike_holds() -> None:
    """Every update of the disturbed run is compared."""
    finding = traces.judge("endurance", traces.family("endurance", CUT))
    assert finding.verdict is Verdict.HELD
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
    verdict, reason = judged(gave_up, calm)
    assert verdict is Verdict.FALSIFIED
    assert "the run ended failed (no workers), the undisturbed run ended completed" in reason
    kept = tuple(one for one in cut.events if not (isinstance(one, Update) and one.step == 1))
    assert judged(replace(cut, events=kept), calm)[1] == "steps [1] were never made"


def test_what_could_not_be_run_or_compared() -> None:
    """A run that never began, has no model, or promises no bits is inconclusive."""
    cut, calm = traces.run(CUT), traces.run(CALM)
    never = replace(cut, events=(End(status="failed", reason="no such backend"),))
    assert judged(never, calm)[0] is Verdict.INCONCLUSIVE
    assert "no such backend" in judged(never, calm)[1]
    assert "no undisturbed run" in judged(cut)[1]
    assert "promises no bits" in judged(replace(cut, promises=()), calm)[1]
    assert judged(calm)[1].startswith("no run had a planned fault: F-WP-005 is decided by a probe")


def test_the_plan_tries_everything() -> None:
    """The plan has every kind of fault, and several in one run."""
    plan = wire.plan_faults(traces.clause("endurance"))
    kinds = {fault.kind for one in plan for fault in one.faults}
    assert kinds == {"restart", "lie", "stranger", *ON_THE_WAY}
    assert {fault.value for one in plan for fault in one.faults} == {*LIES, *STRANGERS, None}
    assert max(len(one.faults) for one in plan) >= 5
