"""The functions on traces that several judges share."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.check import evidence
from entrenar_py.check.evidence import Stay, closeness
from entrenar_py.shared.faults import NEEDED, ON_THE_WAY, Fault
from entrenar_py.shared.trace import (
    Event,
    Halt,
    Injected,
    Membership,
    Saved,
    Shard,
    Start,
    TensorRecord,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Tally, Verdict
from tests import traces
from tests.check.evidence.test_closeness import found, sketched
from tests.traces import altered, broken, hand_written, held, left_open, one, scenario, values

FINITE = st.floats(-1e3, 1e3, width=32)


def update(step: int, rank: int, loss: float = 1.0) -> Update:
    """Return an update, which its loss may distinguish from others of its step."""
    return traces.update(step, rank, loss=loss)


def shard(step: int, number: int, rank: int = 0) -> Shard:
    return traces.shard(step, rank, shard=number, ids=(number,))


def test_failed_runs_are_left_out_with_their_reason() -> None:
    """A crashed run is counted as missing, and its reason is given once."""
    tally = Tally("F-XX-001")
    good, bad = traces.run(scenario()), traces.failed(scenario())
    assert evidence.usable([good, bad, bad], tally) == [good]
    assert tally.missing == [
        "reference with 3 workers did not run to an end: RuntimeError: out of luck"
    ]


def _somewhere(kind: str) -> Fault:
    given = {"rank": 1, "seconds": 2.0, "at": "Commit", "step": 1}
    return Fault(kind=kind, **{name: given[name] for name in NEEDED[kind]})  # type: ignore[arg-type]


def test_a_planted_value_is_no_change_of_membership() -> None:
    """A planted value makes a run another training; a change of members does not."""
    nan = Fault(kind="non_finite_loss", step=1, value="nan")
    moved = tuple(_somewhere(kind) for kind in ("restart", *ON_THE_WAY))
    for faults, is_same in (
        ((), True),
        ((traces.leave(1, 2), traces.join(1, 3)), True),
        (moved, True),
        ((traces.leave(1, 2), nan), False),
    ):
        run = hand_written(subject=scenario(faults=faults))
        assert evidence.is_as_trained(run) is is_same


def test_of_two_updates_the_last_counts() -> None:
    """If a rank has two updates of a step, the last one counts."""
    trace = hand_written(update(1, 0), update(0, 1), update(0, 0, loss=5.0), update(0, 0, loss=2.0))
    by_step = list(evidence.ranks_by_step(trace))
    assert [(step, sorted(by_rank)) for step, by_rank in by_step] == [(0, [0, 1]), (1, [0])]
    assert evidence.any_rank(by_step[0][1]).loss == 2.0


def test_shards_of_committed_steps_in_order() -> None:
    """Shards are sorted by number; those of a step without an update are left out."""
    trace = hand_written(shard(0, 2), shard(0, 0, rank=1), shard(0, 1), shard(1, 0), update(0, 0))
    assert {step: [s.shard for s in part] for step, part in evidence.shards(trace).items()} == {
        0: [0, 1, 2]
    }


def test_the_first_value_that_is_not_finite() -> None:
    """The first non-finite value is named by tensor and element, if values were recorded."""
    tensors = {"a": TensorRecord("x"), "b": values(1, 2), "c": values(1, -math.inf, math.nan)}
    assert evidence.non_finite(tensors) == ("c", 1)
    assert evidence.non_finite({"a": TensorRecord("x"), "b": values(1, 2)}) is None


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [
        (values(1, 2, 3), values(1, 2, 4), {"element": 2}),
        (values(1, 2), values(1, 2, 3), {"expected": "2 elements of float32"}),
        (values(1, 2), values(1, 2, dtype="float64"), {"got": "2 elements of float64"}),
        (values(), values(1), {"expected": "0 elements of float32"}),
        (values(0.0), values(-0.0), {"element": 0, "got": "-0.0"}),
        (values(1), TensorRecord("other"), {"got": "other"}),
        (values(1), TensorRecord("edited", values(1).data), {"got": "edited"}),
        (TensorRecord("empty", ""), TensorRecord("edited", ""), {"got": "edited"}),
    ],
)
def test_the_first_difference(
    expected: TensorRecord, got: TensorRecord, place: dict[str, object]
) -> None:
    """A difference names the element if values are known, else the sizes, else the digests."""
    tally = Tally("F-XX-001")
    closeness.compare_exact(tally, {"w": expected}, {"w": got}, "differ", step=1)
    shown = found(tally)
    assert shown.tensor == "w"
    assert {name: getattr(shown, name) for name in place} == place


@given(st.lists(FINITE, min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 31))
def test_any_flipped_bit_is_found(numbers: list[float], at: int, bit: int) -> None:
    """One flipped bit in one element is found, and names that element."""
    at %= len(numbers)
    array = np.array(numbers, np.float32)
    flipped = array.copy()
    flipped.view(np.uint32)[at] ^= np.uint32(1 << bit)
    tally = Tally("F-XX-001")
    right, wrong = {"w": values(*numbers)}, {"w": record_tensor(flipped, values=True)}
    closeness.compare_exact(tally, right, wrong, "differ")
    assert found(tally).element == at


def test_equal_tensors_count_and_missing_ones_are_named() -> None:
    """Each tensor is one comparison; a tensor on one side only is a difference."""
    tally = Tally("F-XX-001")
    closeness.compare_exact(tally, {"a": values(1), "b": values(2)}, {"a": values(1)}, "differ")
    assert tally.compared == 2
    assert found(tally).tensor == "b"
    closeness.compare_exact(other := Tally("F-XX-001"), {}, {"c": values(1)}, "differ")
    assert found(other).message == "differ: only got holds c"


def test_a_sketch_shows_that_an_element_is_not_finite() -> None:
    """By its norm; the element is unknown."""
    assert evidence.non_finite({"v": sketched(1), "w": sketched(math.nan)}) == ("w", None)


def test_passes_that_are_followed_from_within() -> None:
    """The first pass of each life of a rank, where a model is sharded; no other pass."""
    trace = traces.run(scenario(workload="linear", world_size=2, num_steps=4))
    assert evidence.passes_begun_late(trace) == set()
    first = {rank: one.shard for one in reversed(trace.of(Shard)) for rank in (one.rank,)}.values()
    again = [replace(start, step=2) for start in trace.of(Start)]
    place = next(n for n, e in enumerate(trace.events) if isinstance(e, Shard) and e.step == 2)
    events = (*trace.events[:place], *again, *trace.events[place:])
    bare = (replace(event, gradient={}) if isinstance(event, Shard) else event for event in events)
    sharded = traces.was(replace(trace, events=(*bare,)), shared=True)
    assert evidence.passes_begun_late(sharded) == {(s, n) for s in (0, 2) for n in first}
    whole = traces.was(replace(trace, events=events), shared=True)
    assert evidence.passes_begun_late(whole) == set()


# --- history --------------------------------------------------------------------------------------
# The members of each step, and the events that a resume undid.


def start(step: int, rank: int, *, resumed: bool = False) -> Start:
    """Return a start with default values for fields that don't matter."""
    return Start(step=step, rank=rank, weights={}, resumed=resumed)


def bare_shard(step: int, rank: int) -> Shard:
    """Return a shard without samples."""
    return traces.shard(step, rank, shard=rank, loss_sum=0.0, weight=0.0)


def left(step: int, rank: int) -> Membership:
    """Return the event that worker `rank` leaves."""
    return Membership(step=step, rank=rank, change="left")


def losses(trace: Trace) -> list[tuple[int, int, float]]:
    """Return (step, rank, loss) of the updates that were not undone."""
    return [(u.step, u.rank, u.loss or 0.0) for u in trace.standing.of(Update)]


def test_without_a_resume_everything_stands() -> None:
    """Without a resume the trace itself is returned."""
    trace = traces.run(scenario())
    assert trace.standing is trace


def test_who_comes_where_nobody_is_left_makes_the_step_again() -> None:
    """A worker that joins an abandoned step makes it again. Shards that dead workers computed in it
    are undone, but not the step if one of them made it, nor other steps.
    """
    events: list[Event] = [
        *(start(0, 0), start(0, 1), bare_shard(0, 0), bare_shard(0, 1), update(0, 0)),
        *(bare_shard(1, 0), left(1, 0), bare_shard(1, 1), left(1, 1)),
        *(start(1, 1), bare_shard(1, 1)),
    ]
    stands = hand_written(*events).standing
    assert [(one.step, one.rank) for one in stands.of(Shard)] == [(0, 0), (0, 1), (1, 1)]
    assert losses(hand_written(*events)) == [(0, 0, 1.0)]


def test_what_a_dead_worker_delivered_stands_while_others_live() -> None:
    """If others are alive, a joining worker takes part in the step, and no shard is undone."""
    first: list[Event] = [start(0, 0), start(0, 1), bare_shard(0, 0)]
    assert len(hand_written(*first, left(0, 0), start(0, 0)).standing.of(Shard)) == 1


def test_a_planned_stop_undoes_nothing() -> None:
    """A resume at the step that was reached undoes no event."""
    trace = traces.run(scenario(stops=(2, 4)))
    assert trace.standing == trace


def test_a_rollback_voids_the_later_steps() -> None:
    """Shards, updates, checkpoints and starts after the checkpoint are undone, halts are not."""
    halt = Halt(step=3, reason="power cut")
    voided: list[Event] = [
        *(bare_shard(2, 0), update(2, 0, 9.0), start(3, 0)),
        Saved(step=3, rank=0, weights={}),
    ]
    before: list[Event] = [start(0, 0), update(1, 0), Saved(step=2, rank=0, weights={})]
    after: list[Event] = [start(2, 0, resumed=True), update(2, 0)]
    trace = hand_written(*before, *voided, halt, *after)
    assert trace.standing == hand_written(*before, halt, *after)


def test_ranks_that_resume_one_after_the_other_keep_what_they_made_again() -> None:
    """A rank keeps the steps that it makes again before another rank has resumed."""
    first = [update(2, rank, 9.0) for rank in (0, 1)]
    again: list[Event] = [start(2, 0, resumed=True), update(2, 0)]
    other: list[Event] = [start(2, 1, resumed=True), update(2, 1)]
    assert losses(hand_written(*first, *again, *other)) == [(2, 0, 1.0), (2, 1, 1.0)]


def test_who_left_before_the_rollback_loses_its_steps_too() -> None:
    """The steps of a dead worker are undone by the rollback of those that stayed."""
    both = [update(step, rank, 9.0) for step in (1, 2) for rank in (0, 1)]
    again: list[Event] = [start(2, 0, resumed=True), update(2, 0)]
    stays = [(1, 0, 9.0), (1, 1, 9.0), (2, 1, 9.0), (2, 0, 1.0)]
    assert losses(hand_written(*both, *again)) == stays
    assert losses(hand_written(*both, left(3, 1), start(3, 1), *again)) == stays
    gone = [stays[0], stays[1], stays[3]]
    assert losses(hand_written(*both, left(3, 1), *again)) == gone
    joined = Membership(step=3, rank=1, change="joined")
    assert losses(hand_written(*both, left(3, 1), joined, *again)) == gone


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([start(0, 1)], [Stay(0, math.inf)]),
        ([start(0, 1), start(4, 1, resumed=True)], [Stay(0, math.inf)]),
        ([start(0, 1), left(2, 1), left(3, 1)], [Stay(0, 2)]),
        ([start(0, 1), left(2, 1), start(4, 1)], [Stay(0, 2), Stay(4, math.inf)]),
        ([start(0, 1), left(4, 1), start(3, 0, resumed=True)], [Stay(0, 3)]),
        (
            [start(0, 1), left(4, 1), start(3, 0, resumed=True), start(3, 1, resumed=True)],
            [Stay(0, 3), Stay(3, math.inf)],
        ),
        ([start(0, 1), start(3, 0, resumed=True)], [Stay(0, math.inf)]),
    ],
)
def test_stays(events: list[Event], expected: list[Stay]) -> None:
    """A stay lasts from a start until the rank leaves; a rollback ends it earlier."""
    assert evidence.stays(hand_written(*events))[1] == expected


def test_who_never_started_has_no_stays() -> None:
    """An update or a departure without a start makes no stay."""
    assert evidence.stays(hand_written(update(0, 0), left(1, 0))) == {}


def test_members_of_a_step() -> None:
    """A rank is a member from its first step on, but not in the step in which it left."""
    stays = {0: [Stay(0, math.inf)], 1: [Stay(0, 2), Stay(4, math.inf)]}
    there = [sorted(evidence.members(stays, step)) for step in range(6)]
    assert there == [[0, 1], [0, 1], [0], [0], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([start(0, 1), update(0, 1), left(1, 1)], []),
        ([start(0, 1), left(1, 1), update(0, 1), update(1, 1), update(3, 1)], [1, 3]),
        ([left(1, 1), update(2, 1)], [2]),
        ([start(0, 1), left(1, 1), start(3, 1), update(3, 1)], []),
        ([left(1, 1), Membership(step=3, rank=1, change="joined"), update(3, 1)], []),
        ([left(4, 1), start(2, 0, resumed=True), update(1, 1), update(2, 1)], [2]),
    ],
)
def test_ghosts(events: list[Event], expected: list[int]) -> None:
    """Updates by a rank that has left and not come back are returned, also after a rollback."""
    assert [one.step for one in evidence.ghosts(hand_written(*events))] == expected


# --- skips ----------------------------------------------------------------------------------------
# Steps that a user's trainer skipped, as the checks judge them.


STEP = 2
NAN = Fault(kind="non_finite_gradient", step=STEP, rank=1, value="nan")
STRIKE = Injected(fault=NAN.to_dict(), step=STEP, rank=1, shard=1)


def own(trace: Trace, **changes: Any) -> Trace:
    """Return `trace` as a user's own trainer's, which has skipped no step."""
    told = {"system": "command", "workload": "own", **changes}
    made = replace(trace, scenario=trace.scenario.with_(**told), promises=())
    return traces.was(made, clipping="other")


def skipping(trace: Trace, ranks: Collection[int] = (0, 1, 2), step: int = STEP) -> Trace:
    """Return `trace` with a step that these ranks skipped, with unchanged state and no gradient."""
    for rank in ranks:
        before = one(trace, Update, step=step - 1, rank=rank)
        kept = {"weights": before.weights, "optimizer": before.optimizer, "gradient": {}}
        trace = altered(trace, Update, {"step": step, "rank": rank}, **kept)
    return trace


def struck(trace: Trace) -> Trace:
    """Return `trace` with a NaN in the gradient of `STEP`."""
    return replace(trace, events=(STRIKE, *trace.events))


CALM = traces.run(scenario(optimizer="adamw"))


def test_a_step_that_all_ranks_skip() -> None:
    """A step skipped by all ranks holds despite its NaN, and a note names it."""
    finding = held("finiteness", struck(skipping(own(CALM))))
    (note,) = finding.notes
    assert "skipped step 2 on all ranks, as a GradScaler does" in note
    assert "no weight changed" in note


def test_weights_that_are_lost_skip_nothing() -> None:
    """A step that leaves NaN weights as they were is no step that a scaler skipped."""
    lost = skipping(own(CALM))
    for rank in (0, 1, 2):
        lost = altered(lost, Update, {"step": STEP, "rank": rank}, finite=False)
    assert evidence.skipped(lost) == set()
    finding = traces.judge("finiteness", [struck(lost)])
    assert finding.verdict is Verdict.FALSIFIED
    assert not any("GradScaler" in note for note in finding.notes)


@pytest.mark.parametrize("ranks", [(0, 2), (1,), ()])
def test_a_step_that_some_ranks_skip(ranks: tuple[int, ...]) -> None:
    """If only some ranks skip a step, the others applied the NaN."""
    finding = traces.judge("finiteness", [struck(skipping(own(CALM), ranks))])
    assert "updated in step 2 after a non-finite value" in broken(finding).message


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_skipped_step_that_moves_something(part: str) -> None:
    """A rank that changed a weight or optimizer state did not skip the step."""
    after = {part: getattr(one(CALM, Update, step=STEP, rank=2), part)}
    moved = altered(skipping(own(CALM)), Update, {"step": STEP, "rank": 2}, **after)
    finding = traces.judge("finiteness", [struck(moved)])
    assert "updated in step 2 after a non-finite value" in broken(finding).message
    assert evidence.skipped(moved) == set()


def test_the_harness_own_trainers_halt() -> None:
    """The harness's own trainers must halt instead of skipping."""
    finding = traces.judge("finiteness", [struck(skipping(CALM))])
    assert "updated in step 2 after a non-finite value" in broken(finding).message


def test_another_value_after_a_skipped_step() -> None:
    """A skipped step does not excuse a NaN in another one."""
    later = replace(STRIKE, step=STEP + 1, fault={**NAN.to_dict(), "step": STEP + 1})
    trace = struck(skipping(own(CALM)))
    finding = traces.judge("finiteness", [replace(trace, events=(later, *trace.events))])
    assert "updated in step 3 after a non-finite value" in broken(finding).message


@pytest.mark.parametrize(("step", "detail"), [(1, "values"), (3, "values"), (1, "digests")])
def test_a_step_that_one_run_skips(step: int, detail: str) -> None:
    """If only one run skips a step, they are compared up to that step, or not at all."""
    several = own(traces.run(scenario(detail=detail)))
    alone = own(traces.run(scenario(world_size=1, detail=detail)))
    for who, both in (
        ("this run", (skipping(several, step=step), alone)),
        ("the single-device run", (several, skipping(alone, (0,), step))),
    ):
        told = f"{who} alone skipped step {step}"
        if detail == "values":
            assert any(told in note for note in held("parity", *both).notes)
        else:
            assert told in left_open("parity", *both)


def test_a_run_of_skipped_steps_alone() -> None:
    """A run of skipped steps only is neither compared nor recomputed."""
    sgd = own(traces.run(scenario(num_steps=2)))
    start = {"weights": one(CALM, Update, step=0, rank=0).weights, "gradient": {}, "optimizer": {}}
    still = altered(sgd, Update, {}, **start)
    still = altered(still, Start, {}, weights=start["weights"])
    assert "nothing was recomputed: the run skipped steps 0, 1 on all ranks" in left_open(
        "step_rule", still
    )
