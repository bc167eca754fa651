"""The same bits in every run, and soon again after a worker is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import COUNTS
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Attempt, End, Membership, Shard, Start, Trace, Update
from tests import traces
from tests.traces import altered, falsified, held, left_open, one, scenario, without

SUBJECT = scenario()
BAD = traces.values(1.0)


def pair() -> tuple[Trace, Trace]:
    first, second = traces.family("determinism", SUBJECT)
    return first, second


def counts() -> tuple[Trace, Trace]:
    """Return SUBJECT's run, and that of one worker."""
    return traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1))


@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_other_bits_with_more_workers(part: str) -> None:
    """A tensor that differs on one rank of the larger run is named."""
    many, one = counts()
    found = falsified("worker_count", with_bad(many, {"step": 3, "rank": 2}, part), one)
    assert (found.step, found.rank) == (3, 2)
    assert found.message.startswith(f"3 workers give different bits from 1 ({part})")


def with_bad(trace: Trace, at: dict[str, Any], part: str) -> Trace:
    """Return a run in which the first tensor of a part of an update is another one."""
    name = next(iter(getattr(one(trace, Update, **at), part)))
    return altered(trace, Update, at, **traces.swapping(part, name, BAD))


def test_another_loss_with_more_workers() -> None:
    """A difference in the last bit of a loss is found."""
    many, one = counts()
    loss = many.of(Update)[0].loss or 0.0
    off = altered(many, Update, {"step": 0, "rank": 1}, loss=math.nextafter(loss, 9.0))
    found = falsified("worker_count", one, off)
    assert (found.step, found.rank, found.expected) == (0, 1, str(loss))


def test_steps_of_one_run_only() -> None:
    """A run that makes fewer steps is falsified, with the first step it lacks."""
    many, one = counts()
    assert falsified("worker_count", one, without(many, Update, step=4)).step == 4


def test_what_worker_counts_are_not_compared() -> None:
    """Runs on as many workers, a run halted by a NaN with one that went on, and trainers that
    promise rounding only, which parity judges.
    """
    left_open("worker_count", *pair())
    fault = Fault(kind="non_finite_gradient", step=1, rank=1, value="nan")
    held("worker_count", *traces.family("worker_count", scenario(faults=(fault,))))
    runs = [traces.run(scenario(system="textbook", world_size=n)) for n in (1, 3)]
    assert "promises rounding, not bits" in left_open("worker_count", *runs)


def test_two_runs_differ_in_an_update() -> None:
    """A repetition with another gradient is found."""
    first, second = pair()
    found = falsified("determinism", first, with_bad(second, {"step": 2, "rank": 1}, "gradient"))
    assert (found.step, found.rank) == (2, 1)
    assert found.tensor in second.of(Update)[0].gradient


@pytest.mark.parametrize(
    "change", [{"ids": (0,)}, {"loss_sum": 0.5}, {"draws": "other"}, {"gradient": {"w": BAD}}]
)
def test_two_runs_differ_in_a_shard(change: dict[str, object]) -> None:
    """Samples, loss, random draws and local gradient of every shard must repeat."""
    first, second = pair()
    changed = altered(second, Shard, {"step": 4, "shard": 3}, **change)
    found = falsified("determinism", first, changed)
    assert (found.step, found.shard) == (4, 3)


def test_what_need_not_repeat() -> None:
    """The order of recording, the worker that computes a shard, and what ranks differ in alike.

    Two runs that halt at the same NaN are equal.
    """
    first, second = pair()
    *events, end = second.events
    held("determinism", first, replace(second, events=(*reversed(events), end)))
    held("determinism", first, altered(second, Shard, {"step": 1, "shard": 4}, rank=0))
    held("determinism", *(with_bad(run, {"step": 2, "rank": 1}, "weights") for run in pair()))
    fault = Fault(kind="non_finite_loss", step=1, rank=1, value="nan")
    held("determinism", *traces.family("determinism", scenario(faults=(fault,))))


def test_one_run_repeats_nothing() -> None:
    """A single run is inconclusive."""
    assert "run twice" in left_open("determinism", traces.run(SUBJECT))


def test_what_runs_did_not_record() -> None:
    """Samples of a step or all shards' gradients, of one run only; weights or steps, of both."""
    first, second = pair()
    short = without(second, Shard, step=3)
    reason = "only one run has micro-batches of step 3: record a Shard of each step in both"
    assert reason in left_open("determinism", first, short)
    many, one = counts()
    bare = altered(one, Shard, {}, gradient={})
    assert "record Shard.gradient in both" in left_open("worker_count", many, bare)
    bare, other = (altered(run, Update, {}, weights={}) for run in pair())
    reason = "neither run recorded the weights of step 0: record Update.weights in both"
    assert reason in left_open("determinism", bare, other)
    reason = "record an Update for every rank and step"
    assert reason in left_open("determinism", *(without(run, Update) for run in pair()))


def test_world_sizes_fit_shards_and_samples() -> None:
    """No scenario of the family has more workers than shards or samples."""
    few = scenario(world_size=2, num_shards=4, num_samples=3, batch_size=3)
    assert [s.world_size for s in companions.of((COUNTS,), few)] == [2, 1, 3]


def test_the_devices_that_served_are_named() -> None:
    """Reasons name the devices that computed, since a service's scenario always says cpu."""
    run = traces.run(scenario(world_size=2))
    served = Attempt(backend="wgpu", served=True, device="a GPU")
    ledger = replace(run, promises=(), events=(served, *run.events))
    finding = traces.judge("worker_count", [ledger])
    assert finding.reason.startswith("reference on wgpu promises rounding")


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_what_one_run_did_not_record(part: str, silent: int) -> None:
    """A part that only one run recorded is missing, not different."""
    runs = list(pair())
    runs[silent] = altered(runs[silent], Update, {}, **{part: {}})
    assert (
        left_open("determinism", *runs)
        == f"only one run recorded the {part} of step 0: record Update.{part} in both"
    )


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("part", ["optimizer", "buffers"])
def test_state_that_is_gone(part: str, silent: int) -> None:
    """State recorded after some steps of a run and not after others was lost."""
    subject = scenario(optimizer="momentum")
    runs = list(traces.family("determinism", subject))
    runs[silent] = altered(runs[silent], Update, {"step": 4}, **{part: {}})
    found = falsified("determinism", *runs)
    assert found.step == 4
    assert f"({part}): only" in found.message


def test_the_run_that_is_missing_is_named() -> None:
    """The reason says which field a second run needs, and how the nearest trace differs."""
    one = traces.run(SUBJECT)
    other = replace(one, scenario=SUBJECT.with_(repeat=1, num_steps=9))
    finding = traces.judge("determinism", [one, other])
    assert "a second run of it, its scenario with repeat=1 and all else equal" in finding.reason
    assert finding.reason.endswith("differs in num_steps (9, needed 6)")
    fewer = replace(one, scenario=SUBJECT.with_(world_size=1, seed=9))
    finding = traces.judge("worker_count", [one, fewer])
    assert "record another with world_size=1" in finding.reason
    assert finding.reason.endswith("differs in seed (9, needed 4)")


def test_rounding_on_a_gpu_is_named_and_only_advice() -> None:
    """Kernels that add in any order are named; a larger difference, or one on CPUs, is not that."""
    gpu = {"accelerator": "a GPU"}
    on_gpu = [replace(one, environment={**one.environment, **gpu}) for one in pair()]
    messages = {}
    for name, (first, second), step, changes in [
        ("rounding", on_gpu, 2, math.nextafter),
        ("larger", on_gpu, 2, lambda value, _: value * 1.5),
        ("larger, later", on_gpu, 4, lambda value, _: value * 1.5),
        ("on CPUs", pair(), 2, math.nextafter),
    ]:
        loss = traces.one(second, Update, step=step).loss or 0.0
        changed = altered(second, Update, {"step": step}, loss=changes(loss, 9.0))
        found = falsified("determinism", first, changed)
        messages[name] = found.message
        assert bool(CHECKS["determinism"].advice(found)) == (name == "rounding")
    assert "kernels may add in any order" in messages.pop("rounding")
    assert set(messages.values()) == {"two runs of one scenario differ (loss)"}


@pytest.mark.parametrize("kind", ["a step less", "other draws", "a buffer"])
def test_what_no_kernel_does_is_no_advice_on_a_gpu(kind: str) -> None:
    """Steps, random numbers and buffers of two runs don't differ by an order of additions."""
    first, second = (replace(one, environment={"accelerator": "a GPU"}) for one in pair())
    changed = {
        "a step less": without(second, Update, step=2),
        "other draws": altered(second, Shard, {"step": 2, "shard": 3}, draws="other"),
        "a buffer": with_bad(second, {"step": 2}, "buffers"),
    }
    assert not CHECKS["determinism"].advice(falsified("determinism", first, changed[kind]))


# --- recovery -------------------------------------------------------------------------------------

DISTURBED = scenario(faults=(traces.leave(1, 2),))


def disturbed_pair() -> tuple[Trace, Trace]:
    """Return the disturbed run, promising no bits, and the undisturbed one."""
    disturbed, calm = traces.family("recovery", DISTURBED)
    return replace(disturbed, promises=()), calm


def test_lost_samples_are_named() -> None:
    """Other workers must compute the dead worker's shards in the same step."""
    disturbed, calm = disturbed_pair()
    shard = traces.one(disturbed, Shard, step=2, shard=0)
    lost = altered(disturbed, Shard, {"step": 2, "shard": 0}, ids=(), weight=0.0)
    found = falsified("recovery", lost, calm)
    assert (found.step, found.rank, found.sample_ids) == (2, 1, shard.ids)


def test_a_lost_step_is_named() -> None:
    """A step given up after a worker was lost is found."""
    disturbed, calm = disturbed_pair()
    found = falsified("recovery", without(disturbed, Update, step=4), calm)
    assert (found.step, found.rank) == (4, 1)


def test_a_run_that_ends_with_its_worker() -> None:
    """A run that makes no step after losing a worker is falsified in that step."""
    disturbed, calm = disturbed_pair()
    ended = disturbed
    for step in (2, 3, 4, 5):
        ended = without(ended, Update, step=step)
    found = falsified("recovery", ended, calm, tolerance=0)
    assert found.step == 2


def test_the_dead_do_not_update() -> None:
    """An update by a worker that left is falsified."""
    disturbed, calm = disturbed_pair()
    ghost = replace(disturbed.of(Update)[-1], step=2, rank=1)
    found = falsified("recovery", traces.also(disturbed, ghost), calm)
    assert (found.step, found.rank) == (2, 1)
    assert "but updated" in found.message


@pytest.mark.parametrize(("within", "verdict"), [(1, "falsified"), (2, "held"), (50, "held")])
def test_the_loss_comes_back_in_time(within: int, verdict: str) -> None:
    """A loss off the trajectory in step 3 and back in step 4 took two steps after step 2."""
    disturbed, calm = disturbed_pair()
    off = altered(disturbed, Update, {"step": 3}, loss=9.0)
    finding = traces.judge("recovery", [off, calm], tolerance=within)
    assert finding.verdict == verdict
    if finding.counterexample is not None:
        assert (finding.counterexample.step, finding.counterexample.rank) == (3, 1)


def test_a_short_run_is_judged_at_its_end() -> None:
    """In a run with fewer steps left than the tolerance, the last loss decides."""
    disturbed, calm = disturbed_pair()
    found = falsified("recovery", altered(disturbed, Update, {"step": 5}, loss=9.0), calm)
    assert (found.step, found.got) == (5, "9.0")


def test_a_promise_of_bits_is_kept_through_the_loss() -> None:
    """A trainer that promises bits keeps them after losing a worker."""
    disturbed, calm = traces.family("recovery", DISTURBED)
    bad = traces.swapping("gradient", "output.bias", traces.values(0.0))
    found = falsified("recovery", altered(disturbed, Update, {"step": 3, "rank": 2}, **bad), calm)
    assert (found.step, found.rank, found.tensor) == (3, 2, "output.bias")


def test_the_undisturbed_run_is_needed() -> None:
    """Without the undisturbed run the check is inconclusive."""
    assert "record one with faults=() in its scenario" in left_open(
        "recovery", traces.run(DISTURBED)
    )
    other = traces.run(DISTURBED.with_(faults=(), seed=9))
    finding = traces.judge("recovery", [traces.run(DISTURBED), other])
    assert finding.reason.endswith("the nearest other trace differs in seed (9, needed 4)")


def test_a_run_is_not_compared_with_itself() -> None:
    """A run that a worker left, unplanned by its scenario, is no undisturbed run."""
    disturbed, _ = disturbed_pair()
    assert "by faults=(Fault(kind='leave', rank=1, step=2),) in its scenario" in left_open(
        "recovery", replace(disturbed, scenario=scenario())
    )


@pytest.mark.parametrize("silent", [0, 1])
def test_samples_and_steps_that_one_run_did_not_record(silent: int) -> None:
    """Samples or steps that only one of the runs recorded are missing, not lost."""
    runs = list(disturbed_pair())
    for changed, missing in (
        (without(runs[silent], Shard), "record Shard.ids in both runs"),
        (without(runs[silent], Update), "record an Update for every rank and step"),
    ):
        assert missing in left_open("recovery", *runs[:silent], changed, *runs[silent + 1 :])


@pytest.mark.parametrize("step", [3, 5])
def test_the_dead_make_no_later_step(step: int) -> None:
    """An update by a rank in a step after it left is falsified."""
    disturbed, calm = disturbed_pair()
    ghost = replace(one(disturbed, Update, step=step, rank=0), rank=1)
    found = falsified("recovery", traces.also(disturbed, ghost), calm)
    assert (found.step, found.rank) == (step, 1)


@pytest.mark.parametrize("last", [0, 2])
def test_a_run_that_halts_with_its_worker(last: int) -> None:
    """A run that gives up on losing a worker lost that step's samples, even in step 0."""
    subject = scenario(faults=(traces.leave(1, last),))
    disturbed, calm = traces.family("recovery", subject)
    kept = [e for e in disturbed.events[:-1] if getattr(e, "step", 0) <= last]
    kept = [e for e in kept if not (isinstance(e, Update | Shard) and e.step == last)]
    halted = replace(disturbed, promises=(), events=(*kept, End(status="halted")))
    found = falsified("recovery", halted, calm)
    assert (found.step, found.rank) == (last, 1)
    assert "has different samples" in found.message


def test_samples_of_a_step_that_nobody_recorded() -> None:
    """Samples unrecorded in either run are missing; samples lost in another step are found."""
    for silent in (0, 1):
        runs = list(disturbed_pair())
        runs[silent] = without(runs[silent], Shard, step=4)
        assert "the samples of step 4 are unknown" in left_open("recovery", *runs)
        runs[0] = altered(runs[0], Shard, {"step": 3, "rank": 2}, ids=(), weight=0.0)
        assert falsified("recovery", *runs).step == 3


def test_steps_that_the_undisturbed_run_lacks() -> None:
    """Steps that the undisturbed run lacks, or all, are missing."""
    disturbed, calm = disturbed_pair()
    assert "the undisturbed run has no step 4" in left_open(
        "recovery", disturbed, without(calm, Update, step=4), tolerance=0
    )
    halted = replace(calm, events=(End(status="halted"),))
    finding = traces.judge("recovery", [disturbed, halted])
    assert finding.reason == "the undisturbed run made no step"


def test_a_departure_that_was_planned_and_not_seen() -> None:
    """If one of two planned departures was not recorded, it was not judged."""
    subject = scenario(faults=(traces.leave(1, 2), traces.leave(2, 4)))
    disturbed, calm = traces.family("recovery", subject)
    held("recovery", disturbed, calm)
    assert left_open("recovery", without(disturbed, Membership, rank=2), calm).startswith(
        "rank 2 should leave, but no departure was recorded: record"
    )


def test_no_loss_shows_no_recovery() -> None:
    """Runs in which a worker only joined, or a planned departure did not happen, prove nothing."""
    disturbed, calm = disturbed_pair()
    joined = scenario(faults=(traces.join(2, 3),))
    calm_too = without(disturbed, Membership)
    for family in ([calm_too, calm], traces.family("recovery", joined)):
        assert "no worker left" in left_open("recovery", *family)


def test_a_halted_run_is_not_compared_with_the_undisturbed_one() -> None:
    """A run that also halts at a NaN is not compared with the undisturbed one."""
    fault = Fault(kind="non_finite_loss", step=4, rank=0, value="nan")
    family = traces.family("recovery", scenario(faults=(traces.leave(1, 2), fault)))
    left_open("recovery", *family)


def test_dropout_per_rank_is_off_its_own_trajectory() -> None:
    """A trainer whose masks depend on the members can't be compared with dropout. It holds by its
    runs without dropout, and a note says so.
    """
    subject = scenario(system="textbook", dropout=0.3, faults=(traces.leave(1, 2),))
    family = traces.family("recovery", subject)
    assert left_open("recovery", *family[:2]).endswith(
        "so that losses differ: use dropout 0 in both runs"
    )
    finding = held("recovery", *family)
    assert any("without dropout only" in note for note in finding.notes)
    left_open("recovery", *family[:2], family[3])
    other = traces.family("recovery", subject.with_(dropout=0.0, seed=9))
    assert "use dropout 0 in both runs" in left_open("recovery", *family[:2], *other)


def test_the_textbook_trainer_recovers() -> None:
    """A trainer that promises no bits holds within the published bound."""
    subject = scenario(system="textbook", faults=(traces.leave(1, 2),))
    held("recovery", *traces.family("recovery", subject))


def test_a_calm_run_that_diverged_decides_nothing() -> None:
    """A NaN in the undisturbed run makes the comparison inconclusive."""
    disturbed, calm = disturbed_pair()
    assert "not finite" in left_open(
        "recovery", disturbed, altered(calm, Update, {}, loss=math.nan)
    )


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
    back = traces.also(dead, *again)
    assert CHECKS["recovery"].absent([traces.observed(saves="nothing"), back]) == ""
