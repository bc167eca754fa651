"""What workers get of a step: audits of shards, and shards by measured speed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import shard_assignment
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import Assign, Average, Group, Stage
from entrenar_py.train.wire.shard_assignment import (
    MEASURED,
    NEEDED,
    Audit,
    Pace,
    Verdict,
    proportional,
    verdict,
)
from entrenar_py.train.wire.shard_assignment import makespan as length
from tests.train.wire.mesh import Mesh
from tests.train.wire.situations import link_of
from tests.train.wire.star import Star, Station, run_of


@pytest.mark.parametrize(
    ("copies", "alike", "found"),
    [
        ([1], [0], Verdict(0, None)),
        ([1, 1], [0, 0], Verdict(0, None)),
        ([1, 1], [0, 1], None),
        ([1, 2], [0, 0], Verdict(0, None)),
        ([1, 2], [0, 1], None),
        ([1, 2, 0], [0, 1, 1], Verdict(1, 1)),
        ([1, 2, 0], [0, 1, 0], Verdict(0, 2)),
        ([1, 2, 0], [0, 1, 2], None),
        ([1, 2, 1], [0, 1, 1], Verdict(1, 1)),
        ([1, 2, 1], [0, 1, 0], None),
        ([1, 2, 1, 2], [0, 1, 0, 0], Verdict(0, 2)),
        ([1, 2, 1, 2], [0, 1, 0, 1], None),
        ([1, 2, 1, 2], [0, 1, 2, 2], None),
    ],
)
def test_verdict(copies: list[int], alike: list[int], found: Verdict | None) -> None:
    """A copy of two workers counts, if at most one differs; one worker's two copies are one."""
    assert verdict(copies, alike) == found


@pytest.mark.parametrize(
    ("copies", "present", "asked"),
    [
        ([1, 2], {0, 1, 2}, 0),
        ([1, 2], {1, 2}, 1),
        ([1, 2, 1], {1, 2}, 2),
        ([1, 2, 1, 2], {1, 2}, None),
        ([1, 1], {1}, None),
        ([1], {1}, None),
        ([1], {1, 2}, 2),
        ([1, 2, 0], {0, 1, 2, 3}, None),
        ([1, 2, 1], {0, 1, 2}, 0),
    ],
)
def test_another(copies: list[int], present: Collection[int], asked: int | None) -> None:
    """A third worker is asked, else each of two once more; after three answers nobody is."""
    assert Audit(copies=copies).another(present, turn=0) == asked


def test_everyone_audits_everyone() -> None:
    """The second worker differs with each turn, and is never the first."""
    seconds = {Audit(asked=[1]).second({0, 1, 2, 3}, turn) for turn in range(3)}
    assert seconds == {0, 2, 3}
    assert Audit(asked=[1]).second({1}, 0) is None


def test_who_is_gone_is_forgotten() -> None:
    """A lost worker's copies and requests are removed."""
    audit = Audit(asked=[0, 1], copies=[1, 2, 1])
    assert not audit.forget(3)
    assert audit.forget(1)
    assert audit == Audit(asked=[0], copies=[2])


COSTS = st.dictionaries(
    st.integers(0, 9), st.floats(1e-6, 1e6, allow_subnormal=False), min_size=1, max_size=5
)


def after(dealer: Pace, costs: Mapping[int, float], num_shards: int, num_steps: int) -> list[float]:
    """Return the lengths of some steps in which each rank takes `costs` seconds for a shard."""
    lengths = []
    for _ in range(num_steps):
        counts = dealer.deal(num_shards, costs)
        assert sum(counts.values()) == num_shards
        for rank, count in counts.items():
            if count:
                dealer.computed(rank, count, count * costs[rank])
        lengths.append(length(counts, costs))
    return lengths


@given(COSTS, st.integers(0, 200))
def test_every_shard_is_dealt_once(costs: dict[int, float], num_shards: int) -> None:
    """Whatever the speeds, each shard is in exactly one run, and runs are in rank order."""
    counts = proportional(num_shards, costs)
    runs = sharding.runs(range(num_shards), costs, counts)
    assert list(runs) == sorted(costs)
    assert list(itertools.chain(*runs.values())) == list(range(num_shards))


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3), st.integers(1, 8))
def test_no_deal_is_shorter(costs: Sequence[float], num_shards: int) -> None:
    """Of all deals there are, none lets the last rank be done earlier."""
    by_rank = dict(enumerate(costs))
    ways = itertools.product(range(num_shards + 1), repeat=len(costs))
    best = min(length(dict(enumerate(w)), by_rank) for w in ways if sum(w) == num_shards)
    assert length(proportional(num_shards, by_rank), by_rank) == pytest.approx(best)


@given(st.integers(1, 60), st.integers(1, 9))
def test_equal_workers_get_equal_runs(num_shards: int, num_workers: int) -> None:
    """Before anything is measured the deal is that of a run without measuring."""
    counts = Pace().deal(num_shards, range(num_workers))
    dealt = sharding.runs(range(num_shards), range(num_workers), counts)
    equal = sharding.runs(range(num_shards), range(num_workers))
    assert {rank: list(run) for rank, run in dealt.items()} == {
        rank: list(run) for rank, run in equal.items()
    }


def test_a_slow_worker_gets_its_share() -> None:
    """A worker of a third of the speed has a quarter of the shards once it is measured."""
    dealer = Pace()
    lengths = after(dealer, {0: 1.0, 1: 3.0}, 16, 10)
    assert lengths == [24.0] * NEEDED + [12.0] * (10 - NEEDED)
    assert dealer.counts == {0: 12, 1: 4}


def test_a_change_of_speed_is_followed() -> None:
    """Shards are dealt again a few steps after a worker becomes slower, and when it recovers."""
    dealer = Pace()
    after(dealer, {0: 1.0, 1: 1.0}, 16, 10)
    assert dealer.counts == {0: 8, 1: 8}
    assert after(dealer, {0: 1.0, 1: 3.0}, 16, MEASURED)[-1] == 12.0
    assert after(dealer, {0: 1.0, 1: 1.0}, 16, MEASURED)[-1] == 8.0


def deals(
    costs: Sequence[float], num_shards: int, noise: float, seed: int
) -> list[shard_assignment.Counts]:
    """Return the deals of 60 steps, each once, with times that vary by a share of `noise`."""
    draw, dealer, told = random.Random(seed), Pace(), list[shard_assignment.Counts]()
    for _ in range(60):
        counts = dealer.deal(num_shards, range(len(costs)))
        if dealer.counts not in told[-1:]:
            told.append(dealer.counts)
        for rank, count in counts.items():
            if count:
                seconds = count * costs[rank] * draw.uniform(1 - noise, 1 + noise)
                dealer.computed(rank, count, seconds)
    return told


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5), st.integers(5, 64), st.integers(0))
def test_noise_changes_no_deal(costs: Sequence[float], num_shards: int, seed: int) -> None:
    """Once dealt by speed, shards are not dealt again for times that vary by 2.5 %.

    What such noise can gain is below GAIN: 1 - (0.975 / 1.025) ** 2 = 0.095. There is a shard for
    each worker at first; one without any would be measured only after the second deal.
    """
    assert len(deals(costs, num_shards, 0.025, seed)) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_more_noise_changes_few_deals(seed: int) -> None:
    """With times that vary by 10 % the median of several steps holds the deal all the same."""
    assert len(deals((1.0, 3.0, 1.5), 32, 0.1, seed)) <= 3


def test_one_slow_step_changes_nothing() -> None:
    """A worker that stumbles twice keeps its shards."""
    dealer = Pace()
    after(dealer, {0: 1.0, 1: 1.0}, 8, MEASURED)
    after(dealer, {0: 1.0, 1: 50.0}, 8, 2)
    after(dealer, {0: 1.0, 1: 1.0}, 8, 2 * MEASURED)
    assert dealer.counts == {0: 4, 1: 4}


def test_the_first_steps_say_nothing() -> None:
    """A worker that compiles in its first step isn't taken for a slow one."""
    dealer = Pace()
    after(dealer, {0: 1.0, 1: 90.0}, 8, 1)
    assert set(after(dealer, {0: 1.0, 1: 1.0}, 8, 9)) == {4.0}


def test_who_is_too_slow_is_tried_again() -> None:
    """A worker without shards gets one again now and then, and its share once it has recovered.

    While it stays slow that costs at most 1 / RETRY of the time.
    """
    dealer = Pace()
    slow = {0: 1.0, 1: 30.0}
    after(dealer, slow, 4, NEEDED + 1)
    assert dealer.counts == {0: 4, 1: 0}
    lengths = after(dealer, slow, 4, 1000)
    retries = [at for at, one in enumerate(lengths) if one == 30.0]
    assert len(retries) > 2
    assert sum(lengths) <= 4.0 * 1000 * (1 + 1 / shard_assignment.RETRY)
    after(dealer, {0: 1.0, 1: 1.0}, 4, 200)
    assert dealer.counts == {0: 2, 1: 2}


def test_another_machine_in_its_place() -> None:
    """What was measured of a rank that left doesn't count for the next one of that rank."""
    dealer = Pace()
    after(dealer, {0: 1.0, 1: 3.0}, 16, 9)
    dealer.forget(1)
    assert after(dealer, {0: 1.0}, 16, 1) == [16.0]
    assert dealer.deal(16, [0, 1]) == {0: 8, 1: 8}


def shares(star: Star, step: int) -> Counter[do.Peer]:
    """Return how many shards of `step` each peer was assigned."""
    assigned = [
        (effect.peer, effect.message)
        for effect in star.effects
        if isinstance(effect, do.Send) and isinstance(effect.message, Assign)
    ]
    counts = Counter[do.Peer]()
    for peer, message in assigned:
        counts[peer] += len(message.shards) if message.step == step else 0
    return counts


class Slow:
    """Plays a run in which station number n takes `costs[n]` seconds for a shard."""

    def __init__(self, star: Star | Mesh, costs: Sequence[float]) -> None:
        self._star, self._costs = star, costs
        self._ends: dict[int, float] = {}  # station -> when it ends what it computes

    def play(self) -> None:
        """Deliver messages at once and finish work in its time, until nothing more happens."""
        star = cast("Any", self._star)
        while actions := star.ready():
            told = [one for one in actions if getattr(one, "func", None) != star.work]
            if told:
                told[0]()
                continue
            for number, station in enumerate(star.stations):
                if station.jobs and number not in self._ends:
                    seconds = self._costs[number] * len(station.jobs[0].shards)
                    self._ends[number] = star.now + seconds
            first = min(self._ends, key=self._ends.__getitem__)
            star.now = self._ends.pop(first)
            star.work(star.stations[first])


@pytest.mark.parametrize("by_speed", [True, False])
def test_a_run_deals_by_what_it_measured(by_speed: bool) -> None:
    """A coordinator gives a slow worker fewer shards, if the run says so; each is added once."""
    run = run_of(num_shards=16, num_steps=8, world_size=2, num_awaited=2, by_speed=by_speed)
    star = Star(run)
    for rank in (0, 1):
        star.arrive(rank)
    Slow(star, (1.0, 3.0)).play()
    counted = [list(shares(star, step).values()) for step in range(8)]
    late = [12, 4] if by_speed else [8, 8]
    assert counted == [[8, 8]] * NEEDED + [late] * (8 - NEEDED)
    assert [one for one in star.effects if isinstance(one, do.Dealt)][1:] == (
        [do.Dealt(NEEDED, {0: 12, 1: 4}, {0: 1.0, 1: 3.0})] if by_speed else []
    )


def test_a_new_deal_is_a_new_round_of_a_mesh() -> None:
    """The workers of a mesh hear once who has which shards by now, and go on with that."""
    mesh = Mesh(run_of(num_shards=8, num_steps=7, world_size=2, num_awaited=2, by_speed=True))
    for rank in (0, 1):
        mesh.arrive(rank)
    Slow(mesh, (1.0, 3.0)).play()
    assert mesh.finished == do.Finish("completed")
    sent = [one.message for one in mesh.effects if isinstance(one, do.Send)]
    groups = dict.fromkeys(one for one in sent if isinstance(one, Group))
    assert [(one.step, one.round, one.holders) for one in groups] == [
        (0, 1, (0,) * 4 + (1,) * 4),
        (NEEDED, 2, (0,) * 6 + (1,) * 2),
    ]


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
        "workers [0, 1] disagree on shard 1 of step 0, and it can't be decided which is wrong: "
        "training halted before any update"
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
    assert "caught with wrong results too often" in station.finished.reason
    assert finished(star) == "completed"
