"""The further runs that a run shows to be needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.check.clauses.population import has_ended_epoch
from entrenar_py.check.command import judging
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.check.command.witnesses import Controlling, Nudging, Shortening
from entrenar_py.check.evidence.needs import CONTROLLED, NUDGED, REPEATED, SHORTENED
from entrenar_py.check.harness import judgement
from entrenar_py.shared.faults import Fault, steps_of
from entrenar_py.shared.trace import End, Event, Shard, Trace
from entrenar_py.shared.verdict import Verdict
from falsification import user_chaos
from tests.check.causes.test_presuppositions import own
from tests.check.causes.test_sensitivity import moved
from tests.check.clauses import traces
from tests.check.clauses.micro_batch_traces import STEPS, summed, trace_of
from tests.check.clauses.test_controlled import (
    COUPLED,
    MASKED,
    alone,
    by_rank,
    mirrored,
    numbered,
    off,
    reordered,
    repeated,
)
from tests.check.clauses.test_controlled import planned as planned_in
from tests.check.command import twins
from tests.conftest import shipped_invariants

TASKS = judging.tasks([*shipped_invariants().values()])
TWO, ONE = RunSettings(world_size=2, seed=0), RunSettings(world_size=1, seed=0)
PLAIN = moved([0.0, 0.0])
NEAR = moved([0.0, 1e-3])


def test_a_run_is_nudged_once() -> None:
    """It is the run on one worker; its fault has the size of the nudge."""
    nudging = Nudging({NUDGED})
    assert nudging.after(TWO, PLAIN) == {}
    nudge = Fault(kind="nudged_weights", step=0, value=repr(256 * 2.0**-24))
    assert nudging.after(ONE, NEAR) == {"1-worker-nudged": replace(ONE, faults=(nudge,))}
    assert nudging.after(replace(TWO, repeat=1), NEAR) == {}


@pytest.mark.parametrize(
    ("settings", "trace"),
    [
        (ONE, PLAIN),
        (ONE, moved([1.0, 1.0])),
        (replace(TWO, turn=Turn("clip", "0.1")), NEAR),
    ],
    ids=["equal", "unlike", "clipped"],
)
def test_no_run_is_nudged(settings: RunSettings, trace: object) -> None:
    """Rounding can't be why runs are unlike, and a clipped run must differ."""
    nudging = Nudging({NUDGED})
    nudging.after(TWO, PLAIN)
    assert nudging.after(settings, trace) == {}  # type: ignore[arg-type]


def test_no_check_needs_it() -> None:
    """The checks of a run decide whether one is nudged at all."""
    nudging = Nudging({REPEATED})
    nudging.after(TWO, PLAIN)
    assert nudging.after(ONE, NEAR) == {}


def test_a_chaotic_training_is_no_bug(tmp_path: Path) -> None:
    """It is compared up to the step from which on rounding decides, also when judged again."""
    right, *_ = user_chaos.VARIANTS
    found = twins.findings(right, tmp_path, witnesses=True)
    assert twins.problem(right, found) == ""
    assert found["parity"].verdict is Verdict.HELD
    assert any("rounding alone moves" in note for note in found["parity"].notes)
    kept = judgement.load_stored([tmp_path / "runs"])
    assert "1-worker-nudged" in {file.stem for file in kept}
    (entry,) = judgement.judge_stored(
        [task for task in TASKS if task.invariant.id == "F-DP-005"], kept
    )
    assert entry.verdict is Verdict.HELD


def test_a_bug_in_a_chaotic_training(tmp_path: Path) -> None:
    """It is found in the step that rounding does not decide."""
    bug, *_ = user_chaos.BUGS
    assert twins.problem(bug, twins.findings(bug, tmp_path, witnesses=True)) == ""


TWO = RunSettings(world_size=2, seed=0)


def run(*, num_samples: int = 20, limited: bool = True) -> Trace:
    """Return a run of three steps of four samples, ended by the harness if `limited`."""
    trace = traces.was(
        trace_of([summed(step) for step in range(STEPS)]), losses="backward", sample_ids="seen"
    )
    scenario = trace.scenario.with_(num_samples=num_samples)
    environment = {"ended": "by entrenar-check"} if limited else {}
    return replace(trace, scenario=scenario, environment=environment)


def failed(trace: Trace) -> Trace:
    return replace(trace, events=(*trace.events[:-1], End(status="failed", reason="0 / 0")))


def planned(usual: Trace, short: Trace | None) -> dict[str, RunSettings]:
    """Return what is planned after the first run, or after the run with short epochs."""
    shortening = Shortening({SHORTENED})
    first = shortening.after(TWO, usual)
    return first if short is None else shortening.after(next(iter(first.values())), short)


def test_short_epochs_are_tried_first() -> None:
    """Nothing else is, where nobody needs the end of an epoch, or the run shows it."""
    assert [*planned(run(), None)] == ["2-workers-short-epochs"]
    assert not Shortening({NUDGED}).after(TWO, run())


def test_a_script_that_fails_with_short_epochs_goes_on_into_the_second() -> None:
    """Five steps are an epoch, and four more show ten samples of the next order."""
    (name, settings), *_ = planned(run(), failed(run())).items()
    assert name == "2-workers-two-epochs"
    assert steps_of(settings.faults) == 9


def test_a_sampler_without_an_end_is_not_shortened() -> None:
    """The run with short epochs shows no end either."""
    assert [*planned(run(), run())] == ["2-workers-two-epochs"]


@pytest.mark.parametrize(
    "usual",
    [run(num_samples=400), run(limited=False)],
    ids=["too far", "the script ends by itself"],
)
def test_no_more_steps_where_they_show_nothing(usual: Trace) -> None:
    assert planned(usual, failed(usual)) == {}


def ended(trace: Trace) -> Trace:
    """Return the run with a second epoch, which begins with the last step."""
    events: list[Event] = []
    for event in trace.events:
        is_second = isinstance(event, Shard) and event.step > 1
        events.append(replace(event, epoch=1) if is_second else event)  # type: ignore[call-arg]
    return replace(trace, events=tuple(events))


def test_short_epochs_that_show_their_ends_are_enough() -> None:
    assert planned(run(), ended(run())) == {}


def test_a_script_that_heeds_the_number_of_an_epoch_is_brought_to_later_ones() -> None:
    """An average that is put in after the third; what short epochs don't show, no more steps do."""
    usual = ended(run())
    usual = replace(usual, scenario=usual.scenario.with_(num_steps=8))
    assert planned(usual, None) == {}
    by_epoch = traces.was(usual, by_epoch="train.py:8")
    assert [*planned(by_epoch, None)] == ["2-workers-short-epochs"]
    assert planned(by_epoch, failed(by_epoch)) == {}
    several = by_epoch.scenario.with_(num_steps=3)
    assert planned(replace(by_epoch, scenario=several), None) == {}


TWO, ONE = RunSettings(world_size=2, seed=0), RunSettings(world_size=1, seed=0)


def planned_of_controlling(kind: str, size: int, value: str | None = None) -> RunSettings:
    return replace(ONE, world_size=size, faults=(Fault(kind=kind, step=0, value=value),))


def ordered(trace: Trace) -> Trace:
    return planned_in(trace, "common_order")


NUMBERS = {
    "2-workers-common": planned_of_controlling("common_numbers", 2),
    "1-worker-common": planned_of_controlling("common_numbers", 1),
}
SHARES = {
    "2-workers-mirrored": planned_of_controlling("mirrored_ranks", 2, "2"),
    "1-worker-mirrored-of-2": planned_of_controlling("mirrored_ranks", 1, "2"),
}
ORDER = {
    "2-workers-ordered": planned_of_controlling("common_order", 2),
    "1-worker-ordered": planned_of_controlling("common_order", 1),
}
AGAIN_ALONE = {"1-worker-repeated-of-2": planned_of_controlling("repeated_share", 1, "2")}


def plans(*made: tuple[RunSettings, Trace], wanted: bool = True) -> list[dict[str, RunSettings]]:
    """Return what is planned after each of the runs that were `made`."""
    controlling = Controlling({CONTROLLED if wanted else NUDGED})
    return [controlling.after(settings, trace) for settings, trace in made]


def test_draws_are_made_alike_first() -> None:
    """If the runs can be compared then, nothing else is run; else ranks get one share."""
    plain = (TWO, MASKED[0]), (ONE, MASKED[1])
    assert plans(*plain) == [{}, NUMBERS]
    two, one = NUMBERS.values()
    assert plans(*plain, (two, numbered(own(2))), (one, numbered(own(1))))[2:] == [{}, {}]
    still = numbered(by_rank(off(own(2), by=0.3))), numbered(by_rank(own(1)))
    assert plans(*plain, (two, still[0]), (one, still[1]))[2:] == [{}, SHARES]


def test_samples_are_put_in_one_order() -> None:
    """If that can't be done, all ranks are given one share."""
    plain = (TWO, MASKED[0]), (ONE, reordered(own(1)))
    assert plans(*plain) == [{}, ORDER]
    both = [(settings, ordered(own(settings.world_size))) for settings in ORDER.values()]
    assert plans(*plain, *both)[2:] == [{}, {}]
    both[1] = (both[1][0], ordered(reordered(own(1))))
    assert plans(*plain, *both)[2:] == [{}, SHARES]


def test_copies_are_tried_if_a_share_does_not_agree() -> None:
    """A loss over all ranks' samples is that of one worker on as many copies of the share."""
    plain = (TWO, COUPLED[0]), (ONE, COUPLED[1])
    assert plans(*plain) == [{}, SHARES]
    two, one = SHARES.values()
    assert plans(*plain, (two, mirrored(own(1))), (one, alone(own(1))))[2:] == [{}, {}]
    unlike = (two, mirrored(own(1))), (one, alone(off(own(1), by=0.7)))
    last = next(iter(AGAIN_ALONE.values())), repeated(own(1))
    assert plans(*plain, *unlike, last)[2:] == [{}, AGAIN_ALONE, {}]


@pytest.mark.parametrize("made", [(own(2), own(1)), (off(own(2), times=2.0), own(1))])
def test_runs_that_can_be_compared_need_no_control(made: tuple[Trace, Trace]) -> None:
    """Whether they agree or not."""
    assert plans((TWO, made[0]), (ONE, made[1])) == [{}, {}]


def test_uneven_batches_of_a_worker_are_merged() -> None:
    """As many samples as fit into a number of tokens are others in each step."""
    alone = own(1)
    few = replace(alone, scenario=alone.scenario.with_(batch_size=4))
    assert [*plans((TWO, own(2)), (ONE, few))[1]] == ["1-worker-merged-of-2"]
    assert plans((TWO, own(2)), (ONE, alone))[1] == {}


def test_no_check_needs_it_of_controlling() -> None:
    """The checks of a run decide whether one is controlled at all."""
    assert plans((TWO, MASKED[0]), (ONE, MASKED[1]), wanted=False) == [{}, {}]


def test_short_epochs_are_made_where_samples_are_seen() -> None:
    """A script that reports samples doesn't report those that an epoch leaves out."""
    trace = traces.observed(traces.scenario(num_samples=64), sample_ids="seen")
    assert not has_ended_epoch(trace)
    assert [*Shortening({SHORTENED}).after(TWO, trace)] == ["2-workers-short-epochs"]
    told = traces.was(trace, sample_ids="known", losses="backward")
    assert Shortening({SHORTENED}).after(TWO, told) == {}
