"""The coordinator of a star with audits: an audited shard counts only if two workers agree."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import Assign, Average
from entrenar_py.train.wire.phases import Stage
from tests.train.wire.situations import link_of
from tests.train.wire.star import Star, Station, run_of


def audited(num_workers: int = 3, *, shards: tuple[int, ...] = (1,), **changes: Any) -> Star:
    """Return a star in its first step, of which `shards` are audited."""
    ranks = range(num_workers)
    run = run_of(**{"awaited": {0: ranks}, "audited": lambda step: shards, **changes})
    star = Star(run)
    for _ in ranks:
        star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    return star


def dealt(star: Star) -> list[tuple[int, tuple[int, ...]]]:
    """Return the assignments so far, in order, as (rank, shards)."""
    sent = [(one.peer, one.message) for one in star.effects if isinstance(one, do.Send)]
    return [(int(str(peer)), said.shards) for peer, said in sent if isinstance(said, Assign)]


def of(star: Star, *kinds: type[Effect]) -> list[Effect]:
    """Return the effects of these kinds so far."""
    return [one for one in star.effects if isinstance(one, kinds)]


def wrong(star: Star, rank: int, times: int = 1) -> None:
    """Make the next copies of `rank` wrong."""
    star.record.copies.go_wrong(rank, times)


def finished(star: Star) -> str:
    """Return the end of the run; a completed one must have the undisturbed state."""
    status = star.finish().status
    if status == "completed":
        every = tuple(range(star.run.num_shards))
        assert star.record.state == tuple((step, *every) for step in range(star.run.num_steps))
    return status


def test_an_audited_shard_goes_to_two_by_itself() -> None:
    """It has an Assign of its own; its owner's others share one."""
    star = audited()
    assert dealt(star) == [(0, (0,)), (0, (1,)), (1, (2,)), (2, (3,)), (2, (1,))]


def test_nothing_is_averaged_or_kept_before_the_audit_is_over() -> None:
    """Then every block is averaged, last one first."""
    star = audited(num_blocks=2)
    star.until(lambda: bool(of(star, do.Conclude)))
    before = star.effects[: star.effects.index(of(star, do.Conclude)[0])]
    assert not [one for one in before if isinstance(one, do.Reduce | do.Deliver)]
    assert finished(star) == "completed"
    assert of(star, do.Reduce)[:2] == [do.Reduce(0, 1), do.Reduce(0, 0)]


@pytest.mark.parametrize("culprit", [0, 2])
def test_who_is_wrong_is_caught(culprit: int) -> None:
    """A third copy decides; the wrong worker leaves, and its deliveries are void."""
    star = audited(num_steps=1)
    wrong(star, culprit)
    star.until(lambda: bool(of(star, do.Left)))
    (caught,) = of(star, do.Conclude)
    assert isinstance(caught, do.Conclude)
    assert (caught.shard, caught.culprit) == (1, culprit)
    assert of(star, do.Left) == [
        do.Left(culprit, 0, "caught: shard 1 of step 0 is not what others compute")
    ]
    own = {0: (0,), 2: (3,)}[culprit]
    again = [shards for rank, shards in dealt(star)[5:] if rank != culprit]
    assert again == [(1,), own], "a third opinion, then what only the culprit has computed"
    assert finished(star) == "completed"


def test_an_average_waits_for_what_the_culprit_had() -> None:
    """The culprit's other shards are computed again first."""
    star = audited(num_steps=1)
    wrong(star, 0)
    star.until(lambda: bool(of(star, do.Left)))
    sent = [one.message for one in star.effects if isinstance(one, do.Send)]
    assert not [one for one in sent if isinstance(one, Average)]


def test_two_workers_are_asked_once_more() -> None:
    """The worker whose second copy differs from its first was wrong."""
    for culprit in (0, 1):
        star = audited(2, num_steps=1)
        wrong(star, culprit)
        assert finished(star) == "completed"
        assert star.record.copies.culprits == [culprit]


def test_two_workers_that_stay_with_it_halt_the_run() -> None:
    """It is unknown which one is wrong; no step is made."""
    star = audited(2)
    wrong(star, 1, times=99)
    star.record.copies.go_wrong(0, times=99)
    assert finished(star) == "halted"
    reason = (
        "workers [0, 1] disagree on shard 1 of step 0, and nobody can say who is wrong: training "
        "halted before any update"
    )
    assert of(star, do.Stop) == [do.Stop(0, None, reason, shard=1)]
    assert of(star, do.Conclude) == [do.Conclude(0, 1, (0, 1, 2, 3), disputed=(0, 1))]
    assert not of(star, do.Reduce)


def test_three_answers_halt_the_run() -> None:
    """No fourth worker is asked, because two of the three must be wrong."""
    star = audited(4, world_size=4)
    for rank in range(4):
        wrong(star, rank)
    assert finished(star) == "halted"


def test_who_is_alone_is_not_audited() -> None:
    """With a single worker the only copy counts."""
    star = audited(1)
    assert dealt(star) == [(0, (0, 2, 3)), (0, (1,))]
    assert finished(star) == "completed"
    assert of(star, do.Conclude) == [do.Conclude(0, 1, (0,), 0), do.Conclude(1, 1, (0,), 0)]


def test_nobody_is_audited_by_another_backend() -> None:
    """It would round differently, so a worker without a peer on its backend is alone."""
    run = run_of(awaited={0: range(3)}, audited=lambda step: (0, 2, 3), num_steps=1)
    star = Star(run)
    for backend in ("cpu", "cuda", "cpu"):
        star.arrive(backend=backend)
    assert finished(star) == "completed"
    ranks = {shards[0]: set[int]() for _, shards in dealt(star)}
    for rank, shards in dealt(star):
        ranks[shards[0]].add(rank)
    assert (ranks[0], ranks[2], ranks[3]) == ({0, 2}, {1}, {0, 2})


def _asked_as_third(star: Star) -> Station:
    """Return the worker that is asked for the deciding copy."""
    star.until(lambda: len(dealt(star)) > 5)
    rank, shards = dealt(star)[5]
    assert shards == (1,)
    return star.stations[rank]


def test_the_third_may_die() -> None:
    """The two that disagree are asked again, and take over the third's shards."""
    star = audited(num_steps=1)
    wrong(star, 2)
    third = _asked_as_third(star)
    star.cut(link_of(third))
    assert finished(star) == "completed"
    assert star.record.copies.culprits == [2]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("left", [0, 1])
def test_who_is_left_alone_after_a_dispute_is_not_believed(
    left: int, culprit: int, again: bool
) -> None:
    """The lost worker may have been right, so the run halts.

    Nobody is caught. The effect lists the ranks that took part in the dispute.
    """
    star = audited(2, num_steps=1)
    wrong(star, culprit, times=99)
    star.until(lambda: len(of(star, do.Compare)) == 1 + again)
    star.cut(link_of(star.stations[1 - left]))
    assert finished(star) == "halted"
    (over,) = of(star, do.Conclude)
    assert isinstance(over, do.Conclude)
    assert (over.copy, over.culprit, over.disputed) == (None, None, (0, 1))
    assert not of(star, do.Reduce)


def test_who_took_no_part_in_a_dispute_is_believed() -> None:
    """If both disputants leave, the third counts as alone from the start."""
    star = audited(num_steps=1)
    wrong(star, 2)
    third = _asked_as_third(star)
    for station in star.stations:
        if station is not third:
            star.cut(link_of(station))
    assert finished(star) == "completed"
    assert star.record.copies.culprits == []


def test_an_auditor_that_dies_is_replaced() -> None:
    """A death while an audit is open also voids deliveries."""
    star = audited(num_steps=1)
    star.until(lambda: bool(star.stations[2].jobs))
    star.cut(link_of(star.stations[2]))
    assert dealt(star)[5:] == [(0, (3,)), (1, (1,))]
    assert finished(star) == "completed"


def test_an_owner_that_dies_is_replaced() -> None:
    """Its earlier deliveries of the step are void too, as none was kept."""
    star = audited(num_steps=1, num_shards=6)
    link = link_of(star.stations[0])
    star.until(lambda: star.coordinator.peers[link.peer].delivered == [0])
    assert not of(star, do.Deliver)
    star.cut(link)
    assert finished(star) == "completed"


def test_a_step_that_did_not_happen_has_no_audits() -> None:
    """If all leave, the loss of a new worker before the step hands out nothing."""
    star = audited(3, shards=(0, 1, 2, 3), num_steps=1)
    for link in reversed(list(star.links.values())):
        star.cut(link)
    before = len(dealt(star))
    first, second = star.arrive(0), star.arrive(1)
    star.until(lambda: all(one.machine.rank is not None for one in (first, second)))
    star.deliver()
    assert star.coordinator.stage is Stage.GATHERING
    star.cut(link_of(first))
    assert len(dealt(star)) == before
    assert finished(star) == "completed"


def test_who_was_caught_may_come_back_once() -> None:
    """The second time it is refused for good."""
    star = audited(num_steps=4, awaited={0: range(3), 1: (0,)})
    wrong(star, 0, times=2)
    station = star.stations[0]
    star.until(lambda: station.link is None)
    star.connect(station)
    star.until(lambda: station.link is None)
    assert star.record.copies.culprits == [0, 0]
    star.connect(station)
    star.until(lambda: station.finished is not None)
    assert station.finished is not None
    assert (station.finished.status, len(station.state)) == ("failed", 1)
    assert "caught too often" in station.finished.reason
    assert finished(star) == "completed"
