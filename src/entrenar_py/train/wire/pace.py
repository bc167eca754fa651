"""Measures how fast each worker computes, and decides how many shards of a step it gets.

Shards are logical and the tree over them is fixed, so who computes one changes no bit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping
from statistics import median

MEASURED = 9  # steps; the median of the last ones counts
NEEDED = 3  # fewer say nothing: the first step of a worker may compile its kernels
GAIN = 0.1  # a new deal has to shorten the step by this share, so noise changes none
# A worker that is too slow for any shard gets one again once the steps without it took so many
# times longer than its shard does. A worker that stays slow costs 5 % of the time.
RETRY = 20.0

LEAST_S = 1e-6  # a clock may be too coarse for a small shard

Counts = Mapping[int, int]  # rank -> number of shards


class Pace:
    """The measured workers of one run, and the last deal."""

    def __init__(self) -> None:
        self.counts: Counts = {}
        self._measured: dict[int, deque[float]] = {}  # rank -> seconds a shard, a step each
        self._in_step: dict[int, tuple[int, float]] = {}  # rank -> shards computed, and seconds
        self._idle_s: dict[int, float] = {}  # rank -> length of the steps in which it had no shard

    def computed(self, rank: int, num_shards: int, seconds: float) -> None:
        """Note that `rank` took `seconds` for some shards of this step."""
        shards_before, seconds_before = self._in_step.get(rank, (0, 0.0))
        self._in_step[rank] = shards_before + num_shards, seconds_before + max(seconds, LEAST_S)

    def forget(self, rank: int) -> None:
        """Forget `rank`, which has left; the next one of that rank may be another machine."""
        for known in (self._measured, self._in_step, self._idle_s):
            known.pop(rank, None)

    def costs(self, ranks: Collection[int]) -> dict[int, float]:
        """Return the seconds that each of `ranks` takes for a shard.

        A rank that is not measured yet counts as the median of the others, without others as 1.
        """
        known = {
            rank: median(self._measured[rank])
            for rank in ranks
            if len(self._measured.get(rank, ())) >= NEEDED
        }
        usual = median(known.values()) if known else 1.0
        return {rank: known.get(rank, usual) for rank in sorted(ranks)}

    def deal(self, num_shards: int, ranks: Collection[int]) -> Counts:
        """Return how many shards of the next step each of `ranks` gets."""
        self._end_step()
        costs = self.costs(ranks)
        best = proportional(num_shards, costs)
        is_new = set(self.counts) != set(ranks)
        if is_new or length(best, costs) < (1 - GAIN) * length(self.counts, costs):
            self.counts = best
        return self._with_retry(costs)

    def _end_step(self) -> None:
        for rank, (num_shards, seconds) in self._in_step.items():
            times = self._measured.setdefault(rank, deque(maxlen=MEASURED))
            # After a retry the times from long ago count no more.
            is_retry = self._idle_s.pop(rank, 0.0) > 0 and len(times) >= NEEDED
            times.extend([seconds / num_shards] * (MEASURED if is_retry else 1))
        self._in_step.clear()

    def _with_retry(self, costs: Mapping[int, float]) -> Counts:
        """Return the deal, with one shard for each idle rank whose turn has come again."""
        counts, step_s = dict(self.counts), length(self.counts, costs)
        for rank in [rank for rank, count in self.counts.items() if not count]:
            self._idle_s[rank] = self._idle_s.get(rank, 0.0) + step_s
            giver = max(counts, key=lambda other: counts[other])
            if self._idle_s[rank] >= RETRY * costs[rank] and counts[giver] > 1:
                counts[giver] -= 1
                counts[rank] = 1
        return counts


def proportional(num_shards: int, costs: Mapping[int, float]) -> Counts:
    """Return the deal of `num_shards` after which the last rank is done as early as possible.

    `costs` gives the seconds that each rank takes for a shard. Of equal ranks the first ones get
    more.
    """
    # All that fits into the time that divisible shards would take, then the rest one by one.
    ideal_s = num_shards / sum(1 / cost for cost in costs.values())
    counts = {rank: int(ideal_s / cost) for rank, cost in costs.items()}
    while sum(counts.values()) > num_shards:  # by rounding
        slowest = max(counts, key=lambda rank: (counts[rank] * costs[rank], rank))
        counts[slowest] -= 1
    ends = [((counts[rank] + 1) * cost, rank) for rank, cost in costs.items()]
    heapq.heapify(ends)
    for _ in range(num_shards - sum(counts.values())):
        end_s, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, (end_s + costs[rank], rank))
    return counts


def length(counts: Counts, costs: Mapping[int, float]) -> float:
    """Return the seconds after which the last rank is done."""
    return max(count * costs[rank] for rank, count in counts.items())
