"""Steps that no rule explains, schedules of a script's own, and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check.clauses import CHECKS, step_rule
from entrenar_py.check.evidence.needs import ALONE, REPEATED, Need, Runs
from entrenar_py.shared.trace import End, Event, Start, TensorRecord, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.train.arithmetic import optimizer
from tests import traces
from tests.check.clauses.micro_batch_traces import summed, trace_of
from tests.traces import altered, broken, falsified, held, left_open, one, scenario, without

SUBJECT = scenario(detail="values", clip_norm=0.05, schedule="cosine", warmup_steps=2)


def changed(**changes: Any) -> Trace:
    return altered(traces.run(SUBJECT), Update, {"step": 3, "rank": 1}, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.05}, "not the cosine schedule's"),
        ({"grad_norm": 0.06}, "not the averaged gradient's"),
        ({"applied_norm": 0.06}, "not min(norm, 0.05)"),
        ({"applied_norm": 0.01}, "not min(norm, 0.05)"),
    ],
)
def test_a_number_that_is_off(changes: dict[str, float], message: str) -> None:
    """A wrong rate, norm or clipped norm is found, with step and rank."""
    found = falsified("step_rule", changed(**changes))
    assert (found.step, found.rank) == (3, 1)
    assert message in found.message
    assert found.got == repr(next(iter(changes.values())))


@pytest.mark.parametrize("name", ["hidden1.bias", "hidden2.bias"])
@pytest.mark.parametrize("off", [1.0, -1e-3, math.nan, math.inf])
def test_an_update_that_is_not_sgds(name: str, off: float) -> None:
    """An element that did not move by SGD's formula is named."""
    weights = traces.one(traces.run(SUBJECT), Update, step=3).weights
    value = weights[name].values()
    assert value is not None
    wrong = traces.values(value[0], value[1] + off, value[2])
    found = falsified("step_rule", changed(**traces.swapping("weights", name, wrong)))
    assert (found.step, found.rank, found.tensor, found.element) == (3, 1, name, 1)


def test_clipping_by_half() -> None:
    """An update half as long as the clipped gradient's is found."""
    trace = traces.run(SUBJECT)
    start = traces.one(trace, Start, rank=0)
    after = traces.one(trace, Update, step=0, rank=0)
    halves = {}
    for name, record in after.weights.items():
        before, now = start.weights[name].values(), record.values()
        assert before is not None
        assert now is not None
        halves[name] = traces.values(*(before + (now - before) / 2))
    slower = altered(trace, Update, {"step": 0, "rank": 0}, weights=halves)
    found = falsified("step_rule", slower)
    assert (found.step, found.rank) == (0, 0)
    assert "did not move by learning rate times clipped gradient" in found.message


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_norm": math.nan, "finite": False},
        {"gradient": {}},
        {"weights": {}},
        {"weights": {"hidden1.bias": traces.values(1.0)}},
    ],
)
def test_what_is_unknown_is_missing(changes: dict[str, Any]) -> None:
    """An update with unrecorded or non-finite values is missing, not falsified."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 5, "rank": 1}, **changes)
    assert left_open("step_rule", trace).startswith(
        "rank 1 made an update that can't be recomputed in step 5: record "
    )


def digests(tensors: Tensors, *names: str) -> Tensors:
    """Return `tensors` with those of `names` (by default all) as digests only."""
    bare = names or tuple(tensors)
    return {n: TensorRecord(r.digest) if n in bare else r for n, r in tensors.items()}


@pytest.mark.parametrize(
    ("bare", "reason"),
    [
        pytest.param(
            lambda e: e if e.rank != 1 else replace(e, weights=digests(e.weights)),
            "rank 1 made an update that can't be recomputed in step 0: record Start.weights",
            id="a rank's weights",
        ),
        pytest.param(
            lambda e: e if e.step == 0 else replace(e, weights=digests(e.weights)),
            "ranks 0, 1, 2 made an update that can't be recomputed in step 1: record Update",
            id="all steps but the first",
        ),
        pytest.param(
            lambda e: replace(e, weights=digests(e.weights, "output.bias")),
            "ranks 0, 1, 2 made an update that can't be recomputed in step 0: record Start.weights",
            id="one tensor",
        ),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
def test_one_comparison_excuses_no_gap(
    declared: bool, bare: Callable[[Any], Event], reason: str
) -> None:
    """A rank, step or tensor that can't be recomputed is named, even if others can."""
    trace = traces.run(SUBJECT)
    if not declared:
        trace = altered(trace, Start, {}, trainable=())
    events = (bare(e) if isinstance(e, Start | Update) else e for e in trace.events)
    assert left_open("step_rule", replace(trace, events=tuple(events))).startswith(reason)


def test_a_tensor_that_moved_without_a_gradient() -> None:
    """A tensor that changed must be recomputed, even if its gradient was not recorded."""
    calm = traces.run(SUBJECT.with_(clip_norm=None))
    update = one(calm, Update, step=4, rank=2)
    fewer = {name: record for name, record in update.gradient.items() if name != "output.bias"}
    for trace in (calm, altered(calm, Start, {}, trainable=())):
        at = {"step": 4, "rank": 2}
        bare = altered(trace, Update, at, gradient=fewer, grad_norm=None, applied_norm=None)
        assert "of the same names and sizes" in left_open("step_rule", bare)


def test_moments_after_an_unrecorded_gradient_are_unknown() -> None:
    """A tensor that Adam moved by an unrecorded gradient isn't recomputed in later steps."""
    trace = traces.run(scenario(detail="values", optimizer="adamw", clip_norm=None))
    bare: dict[str, Any] = {"gradient": {}, "grad_norm": None, "applied_norm": None}
    assert "made an update that can't be recomputed" in left_open(
        "step_rule", altered(trace, Update, {"step": 0}, **bare)
    )


def test_a_tensor_that_rests_needs_no_gradient() -> None:
    """An unchanged tensor without a gradient counts as recomputed."""
    weights, moved = {"w": traces.values(1.0), "e": traces.values(2.0)}, traces.values(0.5)
    update = traces.update(
        0, learning_rate=0.5, weights={**weights, "w": moved}, gradient={"w": traces.values(1.0)}
    )
    start = Start(step=0, rank=0, weights=weights, trainable=("w", "e"))
    subject = scenario(learning_rate=0.5, clip_norm=None, workload="own")
    trace = traces.hand_written(start, update, subject=subject)
    held("step_rule", trace)
    unseen = altered(trace, Update, {}, weights={"w": moved})
    left_open("step_rule", unseen)


def test_a_gap_hides_no_rank() -> None:
    """A rank with a wrong update is found, even if another recorded no values."""
    wrong = traces.values(9.0, 9.0, 9.0)
    trace = changed(**traces.swapping("weights", "hidden1.bias", wrong))
    bare = altered(trace, Start, {"rank": 0}, weights={})
    assert falsified("step_rule", bare).rank == 1


@pytest.mark.parametrize("norm", ["grad_norm", "applied_norm"])
def test_clipping_without_norms_is_unknown(norm: str) -> None:
    """With clipping in the scenario both norms must be recorded."""
    trace = altered(traces.run(SUBJECT), Update, {"step": 5, "rank": 1}, **{norm: None})
    reason = left_open("step_rule", trace)
    assert "norms before and after clipping were not recorded" in reason
    assert "record Update.grad_norm and Update.applied_norm" in reason


def test_no_clipping_needs_no_norms() -> None:
    """Without clipping, steps are recomputed without norms, and bugs are still found."""
    calm = traces.run(SUBJECT.with_(clip_norm=None))
    trace = altered(calm, Update, {}, grad_norm=None, applied_norm=None)
    held("step_rule", trace)
    clipped = traces.run(SUBJECT)
    silent = altered(
        replace(clipped, scenario=calm.scenario), Update, {}, grad_norm=None, applied_norm=None
    )
    assert "did not move" in falsified("step_rule", silent).message


def test_clipping_to_a_norm_that_nobody_told() -> None:
    """A trainer that clips to an unknown norm may shorten its gradient, but not lengthen it."""
    clipped = traces.run(SUBJECT)
    own = replace(clipped, scenario=clipped.scenario.with_(clip_norm=None))
    trace = traces.was(own, clipping="other")
    held("step_rule", trace)
    longer = altered(trace, Update, {"step": 1}, applied_norm=1e3)
    assert falsified("step_rule", longer).step == 1


@pytest.mark.parametrize(
    ("subject", "kind", "changes", "missing"),
    [
        (
            {"weight_decay": 0.1},
            Start,
            {"decayed": None},
            "under weight_decay=0.1 in step 0: record Start.decayed",
        ),
        ({}, Update, {"gradient": {}}, "record Update.gradient with values, record_tensor(array"),
        ({}, Update, {"weights": {}}, "record Update.weights with values"),
        (
            {"optimizer": "adamw"},
            Start,
            {"step": 1},
            "adamw has state, in step 0: record the run from step 0",
        ),
        ({"optimizer": "adamw"}, Start, {"weights": {}}, "record Start.weights with values"),
        ({}, Update, {"finite": False}, "and finite=True where they are"),
        ({}, Start, None, "record a Start of each rank, and its weights with values"),
    ],
)
def test_the_fact_that_is_missing_is_named(
    subject: dict[str, Any], kind: type[Event], changes: dict[str, Any] | None, missing: str
) -> None:
    """The reason says why a step could not be recomputed, and what to record."""
    trace = traces.run(SUBJECT.with_(clip_norm=None, **subject))
    bare = without(trace, kind) if changes is None else altered(trace, kind, {}, **changes)
    reason = left_open("step_rule", bare)
    assert reason.startswith("ranks 0, 1, 2 made an update that can't be recomputed")
    assert missing in reason


def test_a_step_that_nobody_can_recompute_is_unknown() -> None:
    """A step recorded as digests only is inconclusive."""
    assert "can't be recomputed" in left_open(
        "step_rule", traces.run(SUBJECT.with_(detail="digests"))
    )


def test_a_small_error_of_the_rate_is_seen() -> None:
    """A step made with 1.00005 times the recorded rate is found."""
    calm = traces.run(SUBJECT.with_(clip_norm=None))
    update = one(calm, Update, step=2, rank=1)
    trace = altered(
        calm, Update, {"step": 2, "rank": 1}, learning_rate=update.learning_rate * 1.00005
    )
    falsified("step_rule", trace)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "momentum"},
        {"optimizer": "adamw"},
        {"weight_decay": 0.1},
        {"stops": (2, 4)},
        {"faults": (traces.leave(1, 1), traces.join(1, 3))},
        {"faults": (traces.leave(1, 1), traces.join(1, 3)), "optimizer": "adamw"},
        {"system": "textbook"},
        {"warmup_steps": 9, "schedule": "linear"},
        {"clip_norm": 1e6},
    ],
)
def test_other_right_rules_hold(changes: dict[str, Any]) -> None:
    """Other optimizers, resumed, joined and independent trainers hold."""
    held("step_rule", traces.run(SUBJECT.with_(**changes)))


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 12),
    num_steps=st.integers(1, 12),
    step=st.integers(0, 11),
)
def test_two_closed_forms_agree(kind: str, warmup_steps: int, num_steps: int, step: int) -> None:
    """The check's schedule and the trainer's, written independently, are the same function."""
    subject = scenario(
        schedule=kind, warmup_steps=warmup_steps, num_steps=num_steps, learning_rate=0.5
    )
    rate = optimizer.learning_rate(
        step, peak=0.5, kind=kind, warmup_steps=warmup_steps, num_steps=num_steps
    )
    assert math.isclose(step_rule.expected_rate(subject, step), rate, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("seen", "applies"),
    [
        ({"rule": "own"}, False),
        ({"rule": "other"}, True),
        ({"rule": "own", "clip_norm": 1.0, "clip_source": "line"}, True),
        ({}, True),
    ],
)
def test_an_optimizer_of_the_user_s_own_has_its_own_rule(
    seen: dict[str, Any], applies: bool
) -> None:
    """The clause does not apply to it, except for a clipping norm that is declared."""
    absent = CHECKS["step_rule"].absent([traces.observed(**seen)])
    assert bool(absent) is not applies


def scheduled(*, factor: float = 1.0, **changes: object) -> Trace:
    """Return a script's run whose rate falls from step to step, times `factor` from step 2 on."""
    ran = traces.run(traces.scenario(**changes))
    subject = ran.scenario.with_(workload="own", system="command")
    return traces.was(
        replace(
            altered(
                ran,
                Update,
                {},
                learning_rate=lambda event: 0.5**event.step * (factor if event.step >= 2 else 1.0),
            ),
            scenario=subject,
        ),
        schedule="other",
    )


def scored(trace: Trace, best: Mapping[int, float]) -> Trace:
    """Return a run whose schedule follows a metric that is so good at best, by step."""
    return altered(trace, Update, {}, metric=lambda event: best.get(event.step))


def compared(**witnesses: Trace) -> Tally:
    """Return the tally of a run beside runs `again` and `alone`."""
    needs: dict[str, Need] = {"again": REPEATED, "alone": ALONE}
    beside = {needs[name]: (run,) for name, run in witnesses.items()}
    tally = Tally("F-TI-008", observed=True)
    step_rule.compare_schedule(tally, Runs(scheduled(), witnesses=beside))
    return tally


def test_equal_rates_count() -> None:
    """Each step is compared with each of the other runs."""
    again, alone = scheduled(repeat=1), scheduled(world_size=1)
    tally = compared(again=again, alone=alone)
    num_steps = len({update.step for update in again.of(Update)})
    assert (tally.compared, tally.missing) == (2 * num_steps, [])


@pytest.mark.parametrize("name", ["again", "alone"])
def test_other_rates_are_missing_evidence(name: str) -> None:
    """A rate that depends on the number of workers may be meant so: it is no alarm."""
    (why,) = compared(**{name: scheduled(factor=2.0, world_size=1)}).missing
    assert why.startswith("the learning rate of step 2 is 0.25 in the run on 3 workers and 0.5 in ")


def test_a_longer_schedule_of_smaller_batches_is_no_reason() -> None:
    """One worker with batches of a worker's size has more steps, and a schedule as long as they."""
    again, alone = scheduled(repeat=1), scheduled(factor=2.0, world_size=1, batch_size=4)
    tally = compared(again=again, alone=alone)
    assert (tally.compared, tally.missing) == (len({u.step for u in again.of(Update)}), [])


def test_other_metrics_are_a_reason_for_other_rates() -> None:
    """One worker may rightly have other weights, whose score reaches its plateau elsewhere."""
    best = {0: 0.9, 1: 0.5, 2: 0.4}
    tally = Tally("F-TI-008", observed=True)
    alone = scored(scheduled(factor=2.0, world_size=1), {**best, 2: 0.45})
    again = scored(scheduled(repeat=1), best)
    beside = {REPEATED: (again,), ALONE: (alone,)}
    step_rule.compare_schedule(tally, Runs(scored(scheduled(), best), witnesses=beside))
    num_steps = len({update.step for update in again.of(Update)})
    assert (tally.compared, tally.missing) == (num_steps + 2, [])


def test_one_metric_is_no_reason_for_other_rates() -> None:
    """Nor are other metrics of a run on the same number of workers."""
    best = {0: 0.9, 1: 0.5, 2: 0.4}
    for changes, others in (({"world_size": 1}, best), ({"repeat": 1}, {**best, 2: 0.45})):
        tally = Tally("F-TI-008", observed=True)
        other = scored(scheduled(factor=2.0, **changes), others)
        beside: dict[Need, tuple[Trace, ...]] = {ALONE: (other,)}
        step_rule.compare_schedule(tally, Runs(scored(scheduled(), best), witnesses=beside))
        assert len(tally.missing) == 1


def test_a_difference_is_told_once() -> None:
    """The run made again and the run on one worker find the same difference, in the same words."""
    several, again = scheduled(factor=2.0), scheduled(factor=2.0, repeat=1)
    alone = scheduled(world_size=1)
    found = set()
    for base in (several, again, alone):
        tally = Tally("F-TI-008", observed=True)
        beside = {REPEATED: (several, again), ALONE: (alone,)}
        step_rule.compare_schedule(tally, Runs(base, witnesses=beside))
        found |= set(tally.missing)
    assert len(found) == 1


def test_without_another_run_it_is_open() -> None:
    """A failed run is no witness."""
    failed = replace(scheduled(), events=(End(status="failed", reason="x"),))
    for tally in (compared(), compared(alone=failed)):
        assert tally.missing == [
            "the learning rate changes by a schedule that is not known here, and there is no other "
            "run to compare it with"
        ]


def following(*metrics: float | None) -> Tally:
    """Return the tally on a run whose ranks' schedules follow these metrics from step 1 on."""
    ran = traces.run(traces.scenario(world_size=len(metrics)))
    tally = Tally("F-TI-008", observed=True)
    step_rule.compare_metrics(
        tally,
        altered(
            ran, Update, {"step": lambda step: step >= 1}, metric=lambda event: metrics[event.rank]
        ),
    )
    return tally


def test_ranks_follow_one_metric() -> None:
    """Ranks that follow metrics of their own share a rate until one of them doesn't improve."""
    found = broken(following(0.5, 0.6, 0.5))
    assert (found.step, found.rank) == (1, 1)
    assert "the best value 0.6, and 0.5 on rank 0" in found.message
    tally = following(0.5, 0.5 + 1e-7, 0.5)
    assert tally.broken is None
    assert tally.compared > 0
    assert following(0.5, None, 0.6).compared == 0  # the last of a pipeline alone has a loss


RUN = trace_of([summed(step) for step in range(3)])


def notes(trace: Trace) -> list[str]:
    tally = Tally("F-TI-008")
    step_rule.tell_notes(tally, trace)
    return tally.notes


def test_an_ordinary_run_has_no_notes() -> None:
    """Nothing edited, no schedule, no decay."""
    assert notes(RUN) == []


def test_a_schedule_that_moves_too_far_is_noted() -> None:
    """Two positions a step, with two workers."""
    (note,) = notes(altered(RUN, Update, {}, schedule=lambda event: 2 * event.step))
    assert "the schedule moves 2 positions in each step (world_size or accumulation)" in note


def test_decay_of_some_flat_tensors_is_noted() -> None:
    """Of two biases only one is decayed."""
    facts = {"decayed": ("a",), "trainable": ("a", "b"), "shapes": {"a": (6,), "b": (4,)}}
    (note,) = notes(traces.altered(RUN, Start, {}, **facts))
    assert note.startswith("weight decay acts on a, which has one dimension")
