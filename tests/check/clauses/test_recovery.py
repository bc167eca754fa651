"""F-DP-006 on traces broken by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import End, Membership, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, one, scenario, without

SUBJECT = scenario(faults=(traces.leave(1, 2),))


def pair() -> tuple[Trace, Trace]:
    """Return the disturbed run, promising no bits, and the undisturbed one."""
    disturbed, calm = traces.family("recovery", SUBJECT)
    return replace(disturbed, promises=()), calm


def test_lost_samples_are_named() -> None:
    """Other workers must compute the dead worker's shards in the same step."""
    disturbed, calm = pair()
    shard = traces.one(disturbed, Shard, step=2, shard=0)
    lost = altered(disturbed, Shard, {"step": 2, "shard": 0}, ids=(), weight=0.0)
    found = broken(traces.judge("recovery", [lost, calm]))
    assert (found.step, found.rank, found.sample_ids) == (2, 1, shard.ids)


def test_a_lost_step_is_named() -> None:
    """A step given up after a worker was lost is found."""
    disturbed, calm = pair()
    found = broken(traces.judge("recovery", [without(disturbed, Update, step=4), calm]))
    assert (found.step, found.rank) == (4, 1)


def test_a_run_that_ends_with_its_worker() -> None:
    """A run that makes no step after losing a worker is falsified in that step."""
    disturbed, calm = pair()
    ended = disturbed
    for step in (2, 3, 4, 5):
        ended = without(ended, Update, step=step)
    found = broken(traces.judge("recovery", [ended, calm], tolerance=0))
    assert found.step == 2


def test_the_dead_do_not_update() -> None:
    """An update by a worker that left is falsified."""
    disturbed, calm = pair()
    ghost = replace(disturbed.of(Update)[-1], step=2, rank=1)
    events = (*disturbed.events[:-1], ghost, disturbed.events[-1])
    found = broken(traces.judge("recovery", [replace(disturbed, events=events), calm]))
    assert (found.step, found.rank) == (2, 1)
    assert "yet updated" in found.message


@pytest.mark.parametrize(("within", "verdict"), [(1, "falsified"), (2, "held"), (50, "held")])
def test_the_loss_comes_back_in_time(within: int, verdict: str) -> None:
    """A loss off the trajectory in step 3 and back in step 4 took two steps after step 2."""
    disturbed, calm = pair()
    off = altered(disturbed, Update, {"step": 3}, loss=9.0)
    finding = traces.judge("recovery", [off, calm], tolerance=within)
    assert finding.verdict == verdict
    if finding.counterexample is not None:
        assert (finding.counterexample.step, finding.counterexample.rank) == (3, 1)


def test_a_short_run_is_judged_at_its_end() -> None:
    """In a run with fewer steps left than the tolerance, the last loss decides."""
    disturbed, calm = pair()
    found = broken(
        traces.judge("recovery", [altered(disturbed, Update, {"step": 5}, loss=9.0), calm])
    )
    assert (found.step, found.got) == (5, "9.0")


def test_a_promise_of_bits_is_kept_through_the_loss() -> None:
    """A trainer that promises bits keeps them after losing a worker."""
    disturbed, calm = traces.family("recovery", SUBJECT)
    right = traces.one(disturbed, Update, step=3).gradient
    bad = traces.swapped(right, "output.bias", traces.values(0.0))
    changed = altered(disturbed, Update, {"step": 3, "rank": 2}, gradient=bad)
    found = broken(traces.judge("recovery", [changed, calm]))
    assert (found.step, found.rank, found.tensor) == (3, 2, "output.bias")


def test_the_undisturbed_run_is_needed() -> None:
    """Without the undisturbed run the check is inconclusive."""
    finding = traces.judge("recovery", [traces.run(SUBJECT)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "record one with faults=() in its scenario" in finding.reason
    other = traces.run(SUBJECT.with_(faults=(), seed=9))
    finding = traces.judge("recovery", [traces.run(SUBJECT), other])
    assert finding.reason.endswith("the nearest other trace differs in seed (9, needed 4)")


def test_a_run_is_not_compared_with_itself() -> None:
    """A run that a worker left, unplanned by its scenario, is no undisturbed run."""
    disturbed, _ = pair()
    finding = traces.judge("recovery", [replace(disturbed, scenario=scenario())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "by faults=(Fault(kind='leave', rank=1, step=2),) in its scenario" in finding.reason


@pytest.mark.parametrize("silent", [0, 1])
def test_what_one_run_did_not_record(silent: int) -> None:
    """Samples or steps that only one of the runs recorded are missing, not lost."""
    runs = list(pair())
    for changed, missing in (
        (without(runs[silent], Shard), "record Shard.ids in both runs"),
        (without(runs[silent], Update), "record an Update for every rank and step"),
    ):
        finding = traces.judge("recovery", [*runs[:silent], changed, *runs[silent + 1 :]])
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert missing in finding.reason


@pytest.mark.parametrize("step", [3, 5])
def test_the_dead_make_no_later_step(step: int) -> None:
    """An update by a rank in a step after it left is falsified."""
    disturbed, calm = pair()
    ghost = replace(one(disturbed, Update, step=step, rank=0), rank=1)
    events = (*disturbed.events[:-1], ghost, disturbed.events[-1])
    found = broken(traces.judge("recovery", [replace(disturbed, events=events), calm]))
    assert (found.step, found.rank) == (step, 1)


@pytest.mark.parametrize("last", [0, 2])
def test_a_run_that_halts_with_its_worker(last: int) -> None:
    """A run that gives up on losing a worker lost that step's samples, even in step 0."""
    subject = scenario(faults=(traces.leave(1, last),))
    disturbed, calm = traces.family("recovery", subject)
    kept = [e for e in disturbed.events[:-1] if getattr(e, "step", 0) <= last]
    kept = [e for e in kept if not (isinstance(e, Update | Shard) and e.step == last)]
    halted = replace(disturbed, promises=(), events=(*kept, End(status="halted")))
    found = broken(traces.judge("recovery", [halted, calm]))
    assert (found.step, found.rank) == (last, 1)
    assert "has other samples" in found.message


def test_samples_of_a_step_that_nobody_recorded() -> None:
    """Samples unrecorded in either run are missing; samples lost in another step are found."""
    for silent in (0, 1):
        runs = list(pair())
        runs[silent] = without(runs[silent], Shard, step=4)
        finding = traces.judge("recovery", runs)
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert "the samples of step 4 are unknown" in finding.reason
        runs[0] = altered(runs[0], Shard, {"step": 3, "rank": 2}, ids=(), weight=0.0)
        assert broken(traces.judge("recovery", runs)).step == 3


def test_steps_that_the_undisturbed_run_lacks() -> None:
    """Steps that the undisturbed run lacks, or all, are missing."""
    disturbed, calm = pair()
    finding = traces.judge("recovery", [disturbed, without(calm, Update, step=4)], tolerance=0)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "the undisturbed run has no step 4" in finding.reason
    halted = replace(calm, events=(End(status="halted"),))
    finding = traces.judge("recovery", [disturbed, halted])
    assert finding.reason == "the undisturbed run made no step"


def test_a_departure_that_was_planned_and_not_seen() -> None:
    """If one of two planned departures was not recorded, it was not judged."""
    subject = scenario(faults=(traces.leave(1, 2), traces.leave(2, 4)))
    disturbed, calm = traces.family("recovery", subject)
    assert traces.judge("recovery", [disturbed, calm]).verdict is Verdict.HELD
    finding = traces.judge("recovery", [without(disturbed, Membership, rank=2), calm])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("rank 2 was to leave, and no departure was recorded: record")


def test_no_loss_shows_no_recovery() -> None:
    """Runs in which a worker only joined, or a planned departure did not happen, prove nothing."""
    disturbed, calm = pair()
    joined = scenario(faults=(traces.join(2, 3),))
    calm_too = without(disturbed, Membership)
    for family in ([calm_too, calm], traces.family("recovery", joined)):
        finding = traces.judge("recovery", family)
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert "no worker left" in finding.reason


def test_a_planted_value_is_another_training() -> None:
    """A run that also halts at a NaN is not compared with the undisturbed one."""
    fault = Fault(kind="non_finite_loss", step=4, rank=0, value="nan")
    family = traces.family("recovery", scenario(faults=(traces.leave(1, 2), fault)))
    assert traces.judge("recovery", family).verdict is Verdict.INCONCLUSIVE


def test_dropout_per_rank_is_off_its_own_trajectory() -> None:
    """A trainer whose masks depend on the members can't be compared with dropout. It holds by its
    runs without dropout, and a note says so.
    """
    subject = scenario(system="textbook", dropout=0.3, faults=(traces.leave(1, 2),))
    family = traces.family("recovery", subject)
    finding = traces.judge("recovery", family[:2])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.endswith("so that losses differ: use dropout 0 in both runs")
    finding = traces.judge("recovery", family)
    assert finding.verdict is Verdict.HELD
    assert any("without dropout only" in note for note in finding.notes)
    assert traces.judge("recovery", [*family[:2], family[3]]).verdict is Verdict.INCONCLUSIVE
    other = traces.family("recovery", subject.with_(dropout=0.0, seed=9))
    finding = traces.judge("recovery", [*family[:2], *other])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "use dropout 0 in both runs" in finding.reason


def test_the_textbook_trainer_recovers() -> None:
    """A trainer that promises no bits holds within the published bound."""
    subject = scenario(system="textbook", faults=(traces.leave(1, 2),))
    finding = traces.judge("recovery", traces.family("recovery", subject))
    assert finding.verdict is Verdict.HELD


def test_a_calm_run_that_diverged_decides_nothing() -> None:
    """A NaN in the undisturbed run makes the comparison inconclusive."""
    disturbed, calm = pair()
    finding = traces.judge("recovery", [disturbed, altered(calm, Update, {}, loss=math.nan)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "not finite" in finding.reason


# --- whether any worker could come back -----------------------------------------------------------


def killed(**seen: Any) -> Trace:
    """Return the run of a script of which worker 2 was killed, and nothing came after it."""
    calm = traces.observed(**seen)
    left = Membership(step=3, rank=2, change="left", reason="killed (SIGKILL)")
    until = [event for event in calm.events if getattr(event, "step", 9) < 3]
    fault = Fault(kind="leave", rank=2, step=3)
    own = calm.scenario.with_(faults=(fault,))
    end = End(status="failed", reason="the launcher restarted no worker")
    return replace(calm, scenario=own, events=(*until, left, end))


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ({"restarts": "nothing"}, "the launcher starts no worker again"),
        ({"restarts": "nothing", "saves": "weights"}, "the launcher starts no worker again"),
        ({"saves": "nothing"}, "no worker was started again, and the script writes no checkpoint"),
        ({"saves": "nothing", "unreached": "train.py:7"}, ""),
        ({"saves": "weights"}, ""),
        ({}, ""),
    ],
)
def test_where_nothing_comes_back_there_is_no_recovery(seen: dict[str, Any], why: str) -> None:
    """The launcher restarts nothing; or nothing was started again, and nothing could go on."""
    absent = CHECKS["recovery"].absent([traces.observed(**seen), killed(**seen)])
    assert (why in absent) if why else absent == ""


def test_a_worker_that_came_back_is_judged() -> None:
    """A second start after the loss is a recovery, whether it has a checkpoint or not."""
    dead = killed(saves="nothing")
    again = [event for event in dead.events if isinstance(event, Start)]
    back = replace(dead, events=(*dead.events[:-1], *again, dead.events[-1]))
    assert CHECKS["recovery"].absent([traces.observed(saves="nothing"), back]) == ""
