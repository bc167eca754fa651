"""Shards are dealt in proportion to measured speeds, and noise doesn't change a deal."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import shard_assignment
from entrenar_py.train.wire.messages import Assign, Group
from entrenar_py.train.wire.shard_assignment import MEASURED, NEEDED, Pace, proportional
from entrenar_py.train.wire.shard_assignment import makespan as length
from tests.train.wire.mesh import Mesh
from tests.train.wire.star import Star, run_of

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
