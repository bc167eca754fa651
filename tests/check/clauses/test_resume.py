"""A resumed run is the straight run; and what its comparison presupposes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS, resume
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.trace import End, Event, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Tally, Verdict
from tests import traces
from tests.traces import altered, broken, falsified, left_open, scenario, undecided, values, without

SUBJECT = scenario(stops=(2, 4), dropout=0.3, optimizer="momentum", schedule="cosine")


def pair() -> tuple[Trace, Trace]:
    stopped, straight = traces.family("resume", SUBJECT)
    return stopped, straight


def test_other_samples_after_the_resume() -> None:
    """A sampler that restarts is found, with the samples that moved."""
    stopped, straight = pair()
    shard = traces.one(stopped, Shard, step=3, shard=1)
    at = {"step": 3, "shard": 1}
    found = falsified("resume", altered(stopped, Shard, at, ids=(11,)), straight)
    assert (found.step, found.rank, found.shard) == (3, shard.rank, 1)
    assert set(found.sample_ids) == {11} ^ set(shard.ids)


def test_another_order_of_the_same_samples() -> None:
    """The order of samples in a shard counts."""
    subject = scenario(stops=(2,), num_shards=3, world_size=1)
    stopped, straight = traces.family("resume", subject)
    shard = traces.one(stopped, Shard, step=3, shard=0)
    assert len(shard.ids) > 1
    at = {"step": 3, "shard": 0}
    turned = altered(stopped, Shard, at, ids=shard.ids[::-1])
    assert falsified("resume", turned, straight).sample_ids == shard.ids[::-1]


def test_other_random_numbers() -> None:
    """A random stream that was not restored is found."""
    stopped, straight = pair()
    changed = altered(stopped, Shard, {"step": 4, "shard": 0}, draws="other")
    found = falsified("resume", changed, straight)
    assert (found.step, found.shard, found.got) == (4, 0, "other")


@pytest.mark.parametrize("unseeded", [False, True])
def test_what_a_script_that_seeds_nothing_draws_after_a_stop(unseeded: bool) -> None:
    """Random numbers after a resume are new ones, unless the script seeds itself."""
    stopped, straight = pair()
    changed = altered(stopped, Shard, {"step": 4, "shard": 0}, draws="other")
    runs = [_of_a_script(trace, unseeded=unseeded) for trace in (changed, straight)]
    finding = traces.judge("resume", runs)
    expected = Verdict.INCONCLUSIVE if unseeded else Verdict.FALSIFIED
    assert finding.verdict is expected, finding.reason
    assert ("seeds nothing" in finding.reason) is unseeded
    traces.held(
        "resume", *[_of_a_script(trace, unseeded=unseeded) for trace in (stopped, straight)]
    )


def _of_a_script(trace: Trace, *, unseeded: bool) -> Trace:
    own = trace.scenario.with_(system="command", workload="own")
    return traces.was(replace(trace, scenario=own, promises=()), unseeded=unseeded)


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers"])
def test_another_state(part: str) -> None:
    """State that was not restored is found in the first step after the resume."""
    stopped, straight = pair()
    name = next(iter(getattr(stopped.of(Update)[0], part)))
    bad = traces.swapping(part, name, traces.values(0.0))
    found = falsified("resume", altered(stopped, Update, {"step": 2, "rank": 1}, **bad), straight)
    assert (found.step, found.rank, found.tensor) == (2, 1, name)


def test_another_learning_rate() -> None:
    """A schedule that restarts is found, even if nothing else differs."""
    stopped, straight = pair()
    changed = altered(stopped, Update, {"step": 5, "rank": 2}, learning_rate=0.05)
    found = falsified("resume", changed, straight)
    assert (found.step, found.rank, found.got) == (5, 2, "0.05")
    assert "a different learning rate, 0.05 and not " in found.message


def test_a_rate_is_looked_for_in_other_steps_only_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps are searched for a wrong rate, and for no right one."""
    sought: list[float] = []

    def step_of_rate(_name: object, rate: float, _updates: object) -> None:
        sought.append(rate)

    monkeypatch.setattr(closeness, "step_of_rate", step_of_rate)
    stopped, straight = pair()
    traces.held("resume", stopped, straight)
    assert not sought
    changed = altered(stopped, Update, {"step": 4}, learning_rate=0.05)
    falsified("resume", changed, straight)
    assert sought == [0.05]


def test_the_straight_run_is_needed() -> None:
    """A stopped run without the straight one is inconclusive."""
    assert "record one with stops=() in its scenario" in left_open("resume", traces.run(SUBJECT))
    other = traces.run(SUBJECT.with_(stops=(), num_steps=5))
    finding = traces.judge("resume", [traces.run(SUBJECT), other])
    assert finding.reason.endswith("the nearest other trace differs in num_steps (5, needed 6)")


def test_a_run_is_not_compared_with_itself() -> None:
    """A run that resumed, without a planned stop in its scenario, is no straight run."""
    stopped, _ = pair()
    assert "must say so by stops=(2,) in its scenario" in left_open(
        "resume", replace(stopped, scenario=SUBJECT.with_(stops=()))
    )


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize(("field", "unknown"), [("ids", ()), ("draws", None), ("gradient", {})])
def test_what_one_run_did_not_record(silent: int, field: str, unknown: object) -> None:
    """Samples and draws that only one of the runs recorded are missing, not different."""
    runs = list(pair())
    runs[silent] = altered(runs[silent], Shard, {}, **{field: unknown})
    for check in ("resume", "determinism"):
        finding = traces.judge(check, [replace(one, scenario=SUBJECT) for one in runs])
        assert finding.verdict is not Verdict.FALSIFIED, finding
    assert f"record Shard.{field} in both" in left_open("resume", *runs)


def test_a_resume_that_was_planned_and_not_seen() -> None:
    """A planned stop without a resume, and one rank's missing steps, are inconclusive."""
    stopped, straight = pair()
    for bare, missing in (
        (without(stopped, Start, resumed=True, step=4), "stop before step 4, but no resume was"),
        (without(stopped, Update, rank=1), "rank 1 recorded step 0 in only one run"),
    ):
        assert missing in left_open("resume", bare, straight)


@pytest.mark.parametrize("part", ["optimizer", "buffers"])
def test_state_that_is_gone_after_the_resume(part: str) -> None:
    """State recorded in every step before the resume, and in none after it, was lost."""
    stopped, straight = pair()
    for step in (2, 3, 4, 5):
        stopped = altered(stopped, Update, {"step": step}, **{part: {}})
    found = falsified("resume", stopped, straight)
    assert found.step == 2
    assert f"({part}): only expected holds" in found.message


def test_a_run_without_stops_shows_nothing() -> None:
    """Two straight runs are inconclusive."""
    assert "stopped and resumed" in left_open("resume", traces.run(scenario()))


@pytest.mark.parametrize("system", ["reference", "textbook"])
def test_a_resume_after_a_loss_holds(system: str) -> None:
    """A resume with fewer workers than at the start holds, and so does a moved shard."""
    subject = scenario(system=system, stops=(4,), faults=(traces.leave(0, 2),), dropout=0.2)
    traces.held("resume", *traces.family("resume", subject))


def test_a_shard_that_moved_is_left_to_its_step() -> None:
    """A shard computed by another worker after the resume is judged by the step's sum."""
    stopped, straight = pair()
    moved = altered(stopped, Shard, {"step": 5, "shard": 0}, rank=2)
    traces.held("resume", moved, straight)


# --- whether there is anything to resume from -----------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ({"saves": "nothing"}, "the script writes no checkpoint: no rank saved its weights in 6"),
        ({"saves": "weights", "loads": "nothing"}, "no line of it loads any"),
        ({"saves": "nothing", "unreached": "train.py:7"}, ""),
        (
            {"saves": "nothing", "unreached": "train.py:7", "loads": "nothing"},
            "the script may save its weights (train.py:7), but no line of it loads any",
        ),
        ({"saves": "weights"}, ""),
        ({}, ""),
    ],
)
def test_a_script_without_checkpoints_has_no_resume(seen: dict[str, Any], why: str) -> None:
    """It writes none, or loads none; what it would have saved later, or nobody looked at, may."""
    absent = CHECKS["resume"].absent([traces.observed(**seen)] * 2)
    assert (why in absent) if why else absent == ""


def test_one_run_with_a_checkpoint_is_enough() -> None:
    """Nor does a clause fail to apply to a run that was stopped: somebody expects a resume."""
    bare = traces.observed(saves="nothing")
    assert CHECKS["resume"].absent([bare, traces.observed(saves="weights")]) == ""
    late = traces.observed(saves="nothing", unreached="train.py:7", loads="nothing")
    best = traces.observed(saves="weights", loads="nothing")
    assert "no line of it loads any" in CHECKS["resume"].absent([late, best])
    stopped = replace(bare, scenario=bare.scenario.with_(stops=(3,)))
    assert CHECKS["resume"].absent([bare, stopped]) == ""


def test_a_resumed_run_that_ends_too_early() -> None:
    """It counts steps that nobody made."""
    resumed, straight = (script(run) for run in pair())
    cut = [event for event in resumed.events if getattr(event, "step", None) != 5]
    finding = traces.judge("resume", [replace(resumed, events=tuple(cut)), straight])
    assert broken(finding).step == 5
    assert "ended by itself after 5 steps, and the one without stops after 6" in finding.reason


@pytest.mark.parametrize(
    ("ended", "verdict"), [({}, Verdict.INCONCLUSIVE), ({"ended": "by us"}, Verdict.HELD)]
)
def test_steps_beyond_those_of_the_straight_run(ended: dict[str, str], verdict: Verdict) -> None:
    """They are compared with nothing; a run that the harness ended would have made them, too."""
    resumed, straight = (script(run) for run in pair())
    cut = [event for event in straight.events if getattr(event, "step", None) != 5]
    short = replace(straight, events=tuple(cut), environment=ended)
    assert traces.judge("resume", [resumed, short]).verdict is verdict


def script(run: Trace) -> Trace:
    own = run.scenario.with_(system="command", workload="own")
    return replace(run, scenario=own, promises=())


def loaded_late(anew: Trace) -> Trace:
    """Return a run whose second life has loaded its weights between a first pass and its steps."""
    end, update = anew.events[-1], anew.of(Update)[0]
    name, record = next(iter(anew.of(Update)[-1].weights.items()))
    return replace(anew, events=(*anew.events[:-1], replace(update, edited={name: record}), end))


def test_weights_that_are_loaded_for_a_test_at_the_end_are_no_resume() -> None:
    """It is seen: a run that is started again beside them begins anew. One that reads them may."""
    straight = traces.observed(saves="weights", saved_after=(2,), loads="late")
    stopped = replace(straight, scenario=straight.scenario.with_(stops=(3,)))
    again = (*straight.events[:-1], *straight.of(Start), straight.events[-1])
    anew = replace(stopped, events=again)
    absent = CHECKS["resume"].absent
    assert "only once it has trained" in absent([straight, anew])
    for other in (
        traces.was(anew, read_back="train.py:3"),
        traces.was(anew, loads=""),
        traces.was(anew, saved_after=()),
        traces.altered(anew, Start, {"rank": 1}, resumed=True),
        loaded_late(anew),
        stopped,
    ):
        assert absent([straight, other]) == "", other.traits
    assert absent([straight]) == ""


def test_a_script_that_reads_none_of_its_files_has_no_resume() -> None:
    """It loads other files, or only in an evaluation: no state of its optimizer is restored."""
    straight = traces.observed(saves="weights", saved_after=(2,), loads="other", starts="one")
    straight = traces.altered(straight, Update, {}, optimizer={"w/exp_avg": values(1.0)})
    alone = replace(straight, scenario=straight.scenario.with_(world_size=1, optimizer="adamw"))
    again = (*alone.events[:-1], *alone.of(Start), alone.events[-1])
    anew = replace(alone, scenario=alone.scenario.with_(stops=(3,)), events=again)
    assert "it read none of them, and started over" in CHECKS["resume"].absent([alone, anew])
    assert "one worker" in CHECKS["optimizer_state"].absent([alone, anew])
    told = traces.was(anew, loads="")
    assert CHECKS["resume"].absent([alone, told]) == ""
    assert CHECKS["optimizer_state"].absent([alone, told]) == ""


# --- commands -------------------------------------------------------------------------------------

OF_A_COMMAND = scenario(system="command", workload="own", world_size=1, num_steps=4)
STOPPED = OF_A_COMMAND.with_(stops=(2,))


def start(weight: float, step: int) -> Start:
    return Start(step=step, rank=0, weights={"w": values(weight)}, resumed=step > 0)


def steps(*numbers: int, ahead: int = 0) -> list[Event]:
    """Return shard and update of each step; after step n the weight is n + 1 + `ahead`."""
    events: list[Event] = []
    for step in numbers:
        shard = traces.shard(step, ids=(step,))
        update = traces.update(step, weights={"w": values(step + 1.0 + ahead)})
        events += [shard, update]
    return events


STRAIGHT = traces.hand_written(start(0.0, 0), *steps(0, 1, 2, 3), subject=OF_A_COMMAND)
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
        (Shard, {"ids": (7,)}, "drew different samples in step 1 than without stops"),
        (Update, {"weights": {"w": values(9.0)}}, "two launches of this command are not the same"),
    ],
)
def test_a_run_that_differed_before_the_stop(
    kind: type[Event], changes: dict[str, Any], words: str
) -> None:
    """What differs before the stop is no fault of the resume: inconclusive, with the reason."""
    assert words in undecided(judged(altered(RESUMED, kind, {"step": 1}, **changes)))


def test_a_step_that_is_not_the_weights() -> None:
    """A script whose own count is off is falsified; one that told observe another step is asked."""
    behind = [start(0.0, 0), *steps(0, 1), start(2.0, 1), *steps(1, 2, 3, ahead=1)]
    finding = judged(traces.hand_written(*behind, subject=STOPPED))
    assert finding.verdict is Verdict.FALSIFIED
    assert "its step count is 1, but 2 steps were made" in finding.reason
    told = [start(0.0, 0), *steps(0, 1), start(2.0, 8), *steps(8, 9)]
    assert "observe(..., step=2)" in undecided(judged(traces.hand_written(*told, subject=STOPPED)))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (0.0, "the script started over, with its initial weights"),
        (9.0, "with weights that no earlier step had"),
    ],
)
def test_a_script_that_begins_anew(weight: float, words: str) -> None:
    """A script that has no checkpoint yet, or doesn't say its step, is asked for it."""
    anew = [start(0.0, 0), *steps(0, 1), start(weight, 0), *steps(0, 1, 2, 3)]
    assert words in undecided(judged(traces.hand_written(*anew, subject=STOPPED)))


@pytest.mark.parametrize(
    ("first", "verdict"), [(0.0, Verdict.FALSIFIED), (1.0, Verdict.INCONCLUSIVE)]
)
def test_a_script_that_reads_its_checkpoint_and_begins_anew(first: float, verdict: Verdict) -> None:
    """It restores nothing; but if a step moved nothing, its weights may be the checkpoint's."""
    anew = [start(first, 0), *steps(0, 1), start(first, 0), *steps(0, 1, 2, 3)]
    trace = traces.hand_written(*anew, subject=STOPPED)
    finding = judged(replace(trace, traits=replace(trace.traits, read_back="train.py:12")))
    assert finding.verdict is verdict
    why = (
        "nothing was restored from it"
        if first == 0.0
        else "at which step it continues can't be told"
    )
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
    assert "2 steps more" in undecided(judged(traces.hand_written(*longer, subject=STOPPED)))


def test_a_script_that_does_not_heed_its_number_of_steps() -> None:
    """A run that goes on where it was to stop was not stopped by {steps}."""
    assert not resume.differed_before(STRAIGHT, RESUMED)
    assert resume.differed_before(STRAIGHT, replace(STRAIGHT, scenario=STOPPED))


def test_the_first_life_ends_where_a_rank_is_started_again() -> None:
    """Events of the second life don't belong to the first."""
    assert [*resume.first_life(RESUMED)] == list(RESUMED.events[:5])
    tally = Tally("F")
    assert resume.repeats(tally, STRAIGHT, replace(RESUMED, events=RESUMED.events[:5]))


# --- the first step after a resume ----------------------------------------------------------------

TWO_STEPS = scenario(system="command", workload="own", world_size=1, num_steps=2)
BEGUN = {"a": values(0.0, 1.0), "b": values(1.0, 0.0)}
TRAINED = {"a": values(5.0, 9.0), "b": values(9.0, 5.0)}
NEXT = {"a": values(5.5, 9.5), "b": values(9.5, 5.5)}
WENT_BACK = "it went back to nearly its value before the first step"
OTHER_CONSTANTS = "the optimizer's settings"


def update(step: int, weights: Tensors) -> Update:
    """Return an update that ends with `weights`; its gradient is always the same."""
    return traces.update(step, weights=weights, gradient={"a": values(1.0, 1.0)})


def resumed(after: Tensors, *, begun: Tensors = BEGUN, held: Tensors = TRAINED) -> Trace:
    """Return a run that begins with `begun`, resumes with `held` and then has weights `after`."""
    return traces.hand_written(
        Start(step=0, rank=0, weights=begun),
        update(0, held),
        Start(step=1, rank=0, weights=held, resumed=True),
        update(1, after),
        subject=TWO_STEPS.with_(stops=(1,)),
    )


STRAIGHT_STEPS = traces.hand_written(
    Start(step=0, rank=0, weights=BEGUN), update(0, TRAINED), update(1, NEXT), subject=TWO_STEPS
)


def found(trace: Trace) -> Counterexample:
    tally = Tally("")
    resume.compare_first_steps(tally, STRAIGHT_STEPS, trace)
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
