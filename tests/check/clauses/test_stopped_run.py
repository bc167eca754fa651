"""A user's stopped run is compared if it is the other run until the stop, and counts as it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import resume
from entrenar_py.shared.trace import End, Event, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Tally, Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, scenario, values

SUBJECT = scenario(system="command", workload="own", world_size=1, num_steps=4)
STOPPED = SUBJECT.with_(stops=(2,))


def start(weight: float, step: int) -> Start:
    """Return the start of a life with this weight."""
    return Start(step=step, rank=0, weights={"w": values(weight)}, resumed=step > 0)


def steps(*numbers: int, ahead: int = 0) -> list[Event]:
    """Return shard and update of each step; after step n the weight is n + 1 + `ahead`."""
    events: list[Event] = []
    for step in numbers:
        shard = Shard(
            step=step,
            epoch=0,
            rank=0,
            shard=0,
            ids=(step,),
            loss_sum=1.0,
            weight=1.0,
            finite=True,
        )
        update = Update(
            step=step,
            rank=0,
            loss=1.0,
            weight=1.0,
            learning_rate=0.1,
            finite=True,
            weights={"w": values(step + 1.0 + ahead)},
        )
        events += [shard, update]
    return events


STRAIGHT = traces.hand_written(start(0.0, 0), *steps(0, 1, 2, 3), subject=SUBJECT)
RESUMED = traces.hand_written(
    start(0.0, 0), *steps(0, 1), start(2.0, 2), *steps(2, 3), subject=STOPPED
)


def judged(trace: Trace) -> Any:
    """Return the finding of F-TI-003."""
    return traces.judge("resume", [trace, STRAIGHT])


def test_a_right_resume_is_held() -> None:
    """The same samples, weights and rates, after the stop and before it."""
    assert judged(RESUMED).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Update, {"learning_rate": 0.2}, "the schedule depends on more than the steps"),
        (Shard, {"ids": (7,)}, "drew other samples in step 1 than without stops"),
        (Update, {"weights": {"w": values(9.0)}}, "two launches of this command are not the same"),
    ],
)
def test_a_run_that_differed_before_the_stop(
    kind: type[Event], changes: dict[str, Any], words: str
) -> None:
    """What differs before the stop is no fault of the resume: inconclusive, with the reason."""
    finding = judged(altered(RESUMED, kind, {"step": 1}, **changes))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert words in finding.reason


def test_a_step_that_is_not_the_weights() -> None:
    """A script whose own count is off is falsified; one that told observe another step is asked."""
    behind = [start(0.0, 0), *steps(0, 1), start(2.0, 1), *steps(1, 2, 3, ahead=1)]
    finding = judged(traces.hand_written(*behind, subject=STOPPED))
    assert finding.verdict is Verdict.FALSIFIED
    assert "its count of steps is 1, and 2 were made" in finding.reason
    told = [start(0.0, 0), *steps(0, 1), start(2.0, 8), *steps(8, 9)]
    finding = judged(traces.hand_written(*told, subject=STOPPED))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "observe(..., step=2)" in finding.reason


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (0.0, "the script began anew, with its initial weights"),
        (9.0, "with weights of no earlier step"),
    ],
)
def test_a_script_that_begins_anew(weight: float, words: str) -> None:
    """A script that has no checkpoint yet, or doesn't say its step, is asked for it."""
    anew = [start(0.0, 0), *steps(0, 1), start(weight, 0), *steps(0, 1, 2, 3)]
    finding = judged(traces.hand_written(*anew, subject=STOPPED))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert words in finding.reason


@pytest.mark.parametrize(
    ("first", "verdict"), [(0.0, Verdict.FALSIFIED), (1.0, Verdict.INCONCLUSIVE)]
)
def test_a_script_that_reads_its_checkpoint_and_begins_anew(first: float, verdict: Verdict) -> None:
    """It restores nothing; but if a step moved nothing, its weights may be the checkpoint's."""
    anew = [start(first, 0), *steps(0, 1), start(first, 0), *steps(0, 1, 2, 3)]
    trace = traces.hand_written(*anew, subject=STOPPED)
    finding = judged(replace(trace, traits=replace(trace.traits, read_back="train.py:12")))
    assert finding.verdict is verdict
    why = "nothing of it was restored" if first == 0.0 else "at which step it goes on can't be told"
    assert "read a checkpoint (train.py:12)" in finding.reason
    assert why in finding.reason


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_a_script_that_reads_its_checkpoint_and_does_not_go_on(status: str) -> None:
    """It may have failed, or have taken the training for finished."""
    cut = traces.hand_written(start(0.0, 0), *steps(0, 1), subject=STOPPED)
    end = End(status=status, reason="exit code 1")
    trace = replace(cut, events=(*cut.events[:-1], end), environment={"unresumed": "it ended"})
    finding = judged(trace)
    assert finding.verdict is Verdict.FALSIFIED
    assert "it ended" in finding.reason
    assert finding.counterexample.step == 2


def test_an_older_checkpoint_is_a_resume() -> None:
    """A script that goes back further than the stop repeats steps, and is right."""
    back = [start(0.0, 0), *steps(0, 1), start(1.0, 1), *steps(1, 2, 3)]
    assert judged(traces.hand_written(*back, subject=STOPPED)).verdict is Verdict.HELD


def test_more_steps_than_without_a_stop() -> None:
    """Steps beyond those of the other run are missing: {steps} may count those of a launch."""
    longer = [start(0.0, 0), *steps(0, 1), start(2.0, 2), *steps(2, 3, 4, 5)]
    finding = judged(traces.hand_written(*longer, subject=STOPPED))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "2 steps more" in finding.reason


def test_a_script_that_does_not_heed_its_number_of_steps() -> None:
    """A run that goes on where it was to stop was not stopped by {steps}."""
    assert not resume.differed_before(STRAIGHT, RESUMED)
    assert resume.differed_before(STRAIGHT, replace(STRAIGHT, scenario=STOPPED))


def test_the_first_life_ends_where_a_rank_is_started_again() -> None:
    """Events of the second life don't belong to the first."""
    assert [*resume.first_life(RESUMED)] == list(RESUMED.events[:5])
    tally = Tally("F")
    assert resume.repeats(tally, STRAIGHT, replace(RESUMED, events=RESUMED.events[:5]))
