"""The members of each step, and the events that a resume undid."""

from __future__ import annotations

import math

import pytest

from entrenar_py.check import evidence
from entrenar_py.check.evidence import Stay
from entrenar_py.shared.trace import Event, Halt, Membership, Saved, Shard, Start, Trace, Update
from tests.check.clauses import traces
from tests.check.clauses.traces import hand_written, scenario


def start(step: int, rank: int, *, resumed: bool = False) -> Start:
    """Return a start with default values for fields that don't matter."""
    return Start(step=step, rank=rank, weights={}, resumed=resumed)


def update(step: int, rank: int, loss: float = 1.0) -> Update:
    """Return an update, which its loss distinguishes from others of its step."""
    return Update(
        step=step,
        rank=rank,
        loss=loss,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights={},
    )


def shard(step: int, rank: int) -> Shard:
    """Return a shard without samples."""
    return Shard(
        step=step, epoch=0, rank=rank, shard=rank, ids=(), loss_sum=0.0, weight=0.0, finite=True
    )


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
    events: list[Event] = [start(0, 0), start(0, 1), shard(0, 0), shard(0, 1), update(0, 0)]
    events += [shard(1, 0), left(1, 0), shard(1, 1), left(1, 1), start(1, 1), shard(1, 1)]
    stands = hand_written(*events).standing
    assert [(one.step, one.rank) for one in stands.of(Shard)] == [(0, 0), (0, 1), (1, 1)]
    assert losses(hand_written(*events)) == [(0, 0, 1.0)]


def test_what_a_dead_worker_delivered_stands_while_others_live() -> None:
    """If others are alive, a joining worker takes part in the step, and no shard is undone."""
    events: list[Event] = [start(0, 0), start(0, 1), shard(0, 0), left(0, 0), start(0, 0)]
    assert len(hand_written(*events).standing.of(Shard)) == 1


def test_a_planned_stop_undoes_nothing() -> None:
    """A resume at the step that was reached undoes no event."""
    trace = traces.run(scenario(stops=(2, 4)))
    assert trace.standing == trace


def test_a_rollback_voids_the_later_steps() -> None:
    """Shards, updates, checkpoints and starts after the checkpoint are undone, halts are not."""
    halt = Halt(step=3, reason="power cut")
    voided: list[Event] = [
        *(shard(2, 0), update(2, 0, 9.0), start(3, 0)),
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
