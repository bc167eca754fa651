"""F-WP-006: the judge's findings on runs whose shards are audited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check.clauses import audits
from entrenar_py.shared.faults import SILENT, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Audit, End, Halt, Injected, Membership, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import falsified, held

WRONG = Fault(kind="corrupt_gradient", step=1, rank=1, shard=2, value="0.5")
AUDITED = Scenario(
    system="parameter_server_simulated",
    workload="linear",
    world_size=3,
    seed=0,
    num_steps=3,
    num_shards=4,
    options={"audit_share": 1.0},
)
CAUGHT = AUDITED.with_(faults=(WRONG,))
LASTING = Fault(kind="corrupt_worker", step=1, rank=1, value="0.5")


def judged(*runs: Trace) -> tuple[Verdict, str]:
    finding = traces.judge("audits", list(runs))
    return finding.verdict, finding.reason


def ran(scenario: Scenario = CAUGHT) -> list[Trace]:
    """Return the run and its model."""
    return traces.family("audits", scenario)


@pytest.mark.parametrize("subject", [AUDITED, CAUGHT, AUDITED.with_(faults=(LASTING,))])
def test_who_is_caught_rightly(subject: Scenario) -> None:
    """With every shard audited, only culprits are named, and all updates and the end agree."""
    finding = held("audits", *ran(subject))
    assert finding.compared > 3 * 4 + 3 * 2


def test_what_was_never_audited_is_open() -> None:
    """If no audit covers the fault, a note says so, and only earlier steps are compared."""
    run, model = ran(CAUGHT.with_(options={"audit_share": 0.2}))
    assert [one.shard for one in run.of(Audit) if one.step == 1] != [WRONG.shard]
    assert judged(run, model)[0] is Verdict.INCONCLUSIVE
    assert "no wrong shard was audited" in judged(run, model)[1]


def test_later_weights_are_open_after_a_slip() -> None:
    """If a permanently wrong worker is caught late, the weights after its first slip stay open."""
    some = AUDITED.with_(options={"audit_share": 0.2}, faults=(LASTING,), num_steps=12)
    finding = held("audits", *ran(some))
    assert finding.notes[0].startswith("a wrong gradient in step 1 was not audited")


def test_who_is_alone_is_open() -> None:
    """A single worker can't be audited, so the run is inconclusive."""
    verdict, reason = judged(*ran(AUDITED.with_(world_size=1)))
    assert verdict is Verdict.INCONCLUSIVE
    assert reason.startswith(
        "shard 0 of step 0 was computed by one worker, and no other worker was present"
    )


@pytest.mark.parametrize(
    ("at", "changes", "reason"),
    [
        (
            {"step": 1, "shard": 2},
            {"culprit": None, "alike": (0, 0, 0)},
            "the audit passed shard 2 of step 1",
        ),
        (
            {"step": 1, "shard": 2},
            {"culprit": 2},
            "worker 2 was named as culprit for shard 2 of step 1,",
        ),
        (
            {"step": 1, "shard": 3},
            {"culprit": 1},
            "worker 1 was named as culprit for shard 3 of step 1,",
        ),
        ({"step": 2, "shard": 0}, {"ranks": (0, 0)}, "shard 0 of step 2 was audited by no other"),
        (
            {"step": 2, "shard": 0},
            {"ranks": (0, 2), "alike": (0, 1)},
            "workers disagreed about shard 0 of step 2, and no third worker was asked to decide",
        ),
        (
            {"step": 2, "shard": 0},
            {"ranks": (0, 2, 1), "alike": (0, 1, 2)},
            "workers disagreed about shard 0 of step 2, no culprit was named, and training went on",
        ),
    ],
)
def test_a_wrong_audit(at: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    """The first wrong audit is named, by step, worker and shard."""
    run, model = ran()
    finding = traces.judge("audits", [traces.altered(run, Audit, at, **changes), model])
    found = traces.broken(finding)
    assert found.message.startswith(reason)
    assert (found.step, found.shard) == (at["step"], at["shard"])


def test_too_few_audits() -> None:
    """A step with fewer audits than the scenario requests is falsified."""
    run, model = ran()
    found = falsified("audits", traces.without(run, Audit, step=0), model)
    assert (found.message, found.step) == ("step 0: 0 of 4 shards were audited", 0)


def test_other_weights_and_lost_steps() -> None:
    """A caught corruption must not have changed the weights or lost a step."""
    run, model = ran()
    other = traces.run(AUDITED.with_(seed=1)).of(Update)[0].weights
    found = traces.altered(run, Update, {"step": 1, "rank": 2}, weights=other)
    assert falsified("audits", found, model).step == 1
    assert judged(traces.without(run, Update, step=2), model)[1] == "steps [2] were never made"


def test_two_that_can_not_be_told_apart() -> None:
    """If the culprit can't be determined, training must halt; a run that goes on is falsified."""
    run, model = ran(AUDITED.with_(world_size=2, faults=(LASTING,)))
    assert run.end.status == "halted"
    assert judged(run, model)[0] is Verdict.HELD
    on = replace(run, events=(*traces.without(run, Halt).events[:-1], End(status="completed")))
    assert judged(on, model)[0] is Verdict.FALSIFIED


@pytest.mark.parametrize("after", [None, (1, 2)])
def test_a_needless_halt(after: tuple[int, int] | None) -> None:
    """A halt is wrong if the culprit was named, or if nothing was audited."""
    run, model = ran()
    place = {} if after is None else {"step": after[0], "shard": after[1]}
    at = 0 if after is None else run.events.index(traces.one(run, Audit, **place)) + 1
    step = 0 if after is None else after[0]
    halt = Halt(step=step, reason="caught somebody")
    ended = (*run.events[:at], halt, End(status="halted", reason=halt.reason))
    finding = traces.judge("audits", [replace(run, events=ended), model])
    assert traces.broken(finding).message.startswith(f"training halted in step {step}, though")
    assert traces.broken(finding).step == step


def test_who_disagrees_is_asked_once_more() -> None:
    """Both workers must compute again before the audit is given up."""
    run, model = ran(AUDITED.with_(world_size=2, faults=(LASTING,)))
    (open_,) = audits.undecided(run)
    place = {"step": open_.step, "shard": open_.shard}
    once = traces.altered(run, Audit, place, ranks=open_.ranks[:3], alike=open_.alike[:3])
    found = falsified("audits", once, model)
    assert found.message.endswith("and not both were asked again")


@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_what_is_not_finite_may_halt_it(kind: str) -> None:
    """A non-finite value may halt the run, whether or not its shard was audited."""
    run, model = ran(AUDITED.with_(faults=(Fault(kind=kind, step=1, shard=2, value="nan"),)))
    assert run.end.status == "halted"
    assert judged(run, model)[0] is Verdict.HELD, judged(run, model)


def test_a_word_against_one_that_is_gone() -> None:
    """If a worker that disagreed has left, the culprit is as unknown as with both present."""
    run, model = ran(AUDITED.with_(world_size=2, faults=(LASTING,)))
    (open_,) = audits.undecided(run)
    assert open_.disputed == (0, 1)
    gone = Membership(step=1, rank=0, change="left", reason="gone")
    audit = next(at for at, event in enumerate(run.events) if event is open_)
    events = (
        *run.events[:audit],
        gone,
        replace(open_, ranks=(1,), alike=(0,)),
        *run.events[audit + 1 :],
    )
    halted = replace(run, events=events)
    assert audits.undecided(halted)
    assert judged(halted, model)[0] is Verdict.HELD
    on = replace(
        halted, events=(*traces.without(halted, Halt).events[:-1], End(status="completed"))
    )
    assert "no culprit was named, and training went on" in judged(on, model)[1]


def test_what_could_not_be_run_or_compared() -> None:
    """A run that never began, has no model, or promises no bits is inconclusive."""
    run, model = ran()
    never = replace(run, events=(End(status="failed", reason="no such backend"),))
    assert "no such backend" in judged(never, model)[1]
    assert "no undisturbed run of the same training" in judged(run)[1]
    assert "promises no bits" in judged(replace(run, promises=()), model)[1]
    assert judged(model)[1].startswith("no shard of any run was audited: F-WP-006 is decided by")


def test_a_place_that_nobody_named_is_no_crash() -> None:
    """A corruption without a place is falsified, since no audit can be shown to cover it."""
    run, model = ran()
    vague = traces.altered(run, Injected, {}, step=None, shard=None)
    assert judged(vague, model)[0] is Verdict.FALSIFIED


def test_the_plan_tries_everything() -> None:
    """The plan has every kind and share, and two workers or more. Each fault strikes; all hold."""
    plan = audits.plan(traces.clause("audits"))
    assert {fault.kind for one in plan for fault in one.faults} >= set(SILENT)
    assert {one.options["audit_share"] for one in plan} == {0.2, 0.4, 1.0}
    assert {one.world_size for one in plan} == {2, 3, 4}
    struck = [systems.run(one).of(Injected) for one in plan if one.faults]
    assert all(struck)
