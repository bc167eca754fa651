"""The assignment of a step's shards to workers, and the account of their deliveries.

An audited shard is assigned to two workers, and counts when two workers agree on its result.
Nothing is averaged until every audit of the step is over. If a worker leaves before that, all its
deliveries for the step are void, because an audit might have shown that they were wrong.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.attendance import Attendance, Member
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import Assign, Computed, TreeNode
from entrenar_py.train.wire.messages import PeerPhase as Phase
from entrenar_py.train.wire.terms import Run, Timing

# Audits: several workers compute copies of one shard, which are compared bit for bit.
#
# A copy counts when two workers agree on it. The functions below select the workers, and identify a
# worker that is wrong.


@dataclass(slots=True)
class Audit:
    """The audit of one shard. `asked` holds the ranks that are computing a copy.

    `copies` has the rank of each complete copy, in the order of completion; a rank that computed
    the shard twice appears twice. `disputed` has all ranks that disagreed, even if they have left.
    For each compared copy, `alike` has the index of the first copy with the same bits.
    """

    asked: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    disputed: set[int] = field(default_factory=set)
    alike: tuple[int, ...] = ()

    def end_copy(self, rank: int) -> None:
        """Record that the copy of `rank` is complete."""
        self.asked.remove(rank)
        self.copies.append(rank)

    def forget(self, rank: int) -> bool:
        """Remove `rank`, which has left, and its copies; return whether it took part."""
        if rank not in (*self.asked, *self.copies):
            return False
        self.asked = [other for other in self.asked if other != rank]
        self.copies = [other for other in self.copies if other != rank]
        return True

    def is_one_word(self) -> bool:
        """Return whether all copies come from one worker that took part in a dispute."""
        return len(set(self.copies)) == 1 and self.disputed.issuperset(self.copies)

    def second(self, present: Collection[int], turn: int) -> int | None:
        """Return a rank in `present` that was not asked yet; None if all were asked.

        `turn` varies with the shard and the step, so over time every worker audits every other
        worker.
        """
        others = sorted(set(present).difference(self.asked, self.copies))
        return others[turn % len(others)] if others else None

    def another(self, present: Collection[int], turn: int) -> int | None:
        """Return the rank for one more copy: a third rank, or one of the two again, or None."""
        if len(set(self.copies)) > 2:
            return None
        third = self.second(present, turn)
        once = [rank for rank in self.copies if self.copies.count(rank) == 1 and rank in present]
        if len(set(self.copies)) < 2:
            once = []  # no second worker remains that could agree
        return third if third is not None else next(iter(once), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an audit.

    `copy` is the index of the copy that counts; `culprit` is the rank that differs, None if no rank
    does.
    """

    copy: int
    culprit: int | None


def verdict(copies: Sequence[int], alike: Sequence[int]) -> Verdict | None:
    """Return the copy that two workers agree on, and the rank that differs; None if undecided.

    `copies` has the rank of each copy, `alike` the index of the first copy with the same bits.
    Identical copies of a single worker count, too.
    """
    if len(set(copies)) == len(set(alike)) == 1:
        return Verdict(0, None)
    for first in sorted(set(alike)):
        agreed = {rank for rank, like in zip(copies, alike, strict=True) if like == first}
        others = {rank for rank, like in zip(copies, alike, strict=True) if like != first}
        if len(agreed) > 1 and len(others) < 2:
            return Verdict(first, next(iter(others), None))
    return None


# The code below measures how fast each worker computes, and decides how many shards it gets.
#
# Shards are logical and the tree over them is fixed, so every worker computes a shard with the same
# bits.

MEASURED = 9  # steps; the median of this many last ones counts
NEEDED = 3  # fewer are not enough: a worker's first step may compile its kernels
GAIN = 0.1  # a new assignment must shorten the step by this fraction, so noise doesn't change it
# A worker that is too slow for any shard gets a shard again when the steps without it took this
# many times longer than its shard takes. A worker that stays slow costs 5 % of the time.
RETRY = 20.0

LEAST_S = 1e-6  # a clock may be too coarse for a small shard

Counts = Mapping[int, int]  # rank -> number of shards


class Pace:
    """The measured speeds of a run's workers, and the last assignment of shards to them."""

    def __init__(self) -> None:
        self.counts: Counts = {}
        self._measured: dict[int, deque[float]] = {}  # rank -> seconds per shard, for each step
        self._in_step: dict[int, tuple[int, float]] = {}  # rank -> shards computed, and seconds
        self._idle_s: dict[int, float] = {}  # rank -> seconds of the steps in which it had no shard

    def computed(self, rank: int, num_shards: int, seconds: float) -> None:
        """Note that `rank` took `seconds` for some shards of this step."""
        shards_before, seconds_before = self._in_step.get(rank, (0, 0.0))
        self._in_step[rank] = shards_before + num_shards, seconds_before + max(seconds, LEAST_S)

    def forget(self, rank: int) -> None:
        """Forget `rank`, which has left; the next worker with that rank may be another machine."""
        for known in (self._measured, self._in_step, self._idle_s):
            known.pop(rank, None)

    def costs(self, ranks: Collection[int]) -> dict[int, float]:
        """Return the seconds that each of `ranks` takes for a shard.

        A rank without measurements gets the median of the measured ranks, or 1.0 if there are none.
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
        if is_new or makespan(best, costs) < (1 - GAIN) * makespan(self.counts, costs):
            self.counts = best
        return self._with_retry(costs)

    def _end_step(self) -> None:
        for rank, (num_shards, seconds) in self._in_step.items():
            times = self._measured.setdefault(rank, deque(maxlen=MEASURED))
            # After a retry, the old times no longer count.
            is_retry = self._idle_s.pop(rank, 0.0) > 0 and len(times) >= NEEDED
            times.extend([seconds / num_shards] * (MEASURED if is_retry else 1))
        self._in_step.clear()

    def _with_retry(self, costs: Mapping[int, float]) -> Counts:
        """Return the assignment, with one shard for each idle rank that is due for a retry."""
        counts, step_s = dict(self.counts), makespan(self.counts, costs)
        for rank in [rank for rank, count in self.counts.items() if not count]:
            self._idle_s[rank] = self._idle_s.get(rank, 0.0) + step_s
            giver = max(counts, key=lambda other: counts[other])
            if self._idle_s[rank] >= RETRY * costs[rank] and counts[giver] > 1:
                counts[giver] -= 1
                counts[rank] = 1
        return counts


def proportional(num_shards: int, costs: Mapping[int, float]) -> Counts:
    """Return the assignment of `num_shards` with which the last rank finishes earliest.

    `costs` has the seconds that each rank takes for a shard. Among equally fast ranks, the first
    ones get more.
    """
    # First all whole shards that fit into the time that divisible shards would take, then the rest
    # one by one.
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


def makespan(counts: Counts, costs: Mapping[int, float]) -> float:
    """Return the seconds until the last rank finishes."""
    return max(count * costs[rank] for rank, count in counts.items())


class Dealing(Attendance):
    """Assigns the shards of one step at a time to the participating workers."""

    def __init__(self, run: Run, *, secret: bytes, timing: Timing) -> None:
        super().__init__(run, secret=secret, timing=timing)
        self.step = run.first_step
        self._missing: dict[int, set[int]] = {}  # block -> shards not yet delivered
        self._reducing: set[int] = set()  # blocks that are delivered but not yet averaged
        self._audits: dict[int, Audit] = {}  # shard -> its open audit
        self._pace = Pace()

    # --- assignment -------------------------------------------------------------------------------

    def _deal(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        """Assign all shards of the step; assign each audited shard to two workers."""
        shards = range(self.run.num_shards)
        self._missing = {block: set(shards) for block in range(self.run.num_blocks)}
        self._audits = {shard: Audit() for shard in sorted(self.run.audited(self.step))}
        before, ranks = self._pace.counts, [member.in_rank() for member in members.values()]
        counts = self._pace.deal(len(shards), ranks) if self.run.by_speed else None
        dealt = [] if self._pace.counts == before else [self._dealt()]
        assigned = [*dealt, *self._assign(shards, members, now, counts)]
        pursued = [effect for shard in self._audits for effect in self._pursue(shard, now)]
        return [*assigned, *pursued]

    def _dealt(self) -> do.Dealt:
        costs = self._pace.costs(self._pace.counts)
        return do.Dealt(self.step, self._pace.counts, costs)

    def _assign(
        self,
        shards: Sequence[int],
        members: Mapping[Peer, Member],
        now: float,
        counts: Counts | None = None,
    ) -> list[Effect]:
        """Divide `shards` among `members`: each gets adjacent shards, added to its present ones.

        `counts` says how many shards each gets; by default that depends on its measured speed.
        """
        peer_of = {member.in_rank(): peer for peer, member in members.items()}
        if counts is None and self.run.by_speed:
            counts = proportional(len(shards), self._pace.costs(peer_of))
        effects: list[Effect] = []
        for rank, run in sharding.runs(shards, peer_of, counts).items():
            plain = tuple(shard for shard in run if shard not in self._audits)
            if plain:
                effects += self._give(peer_of[rank], plain, now)
            for shard in run:
                if shard in self._audits:
                    effects += self._ask(rank, shard, now)
        return effects

    def _give(self, peer: Peer, shards: tuple[int, ...], now: float) -> list[Effect]:
        member = self.peers[peer]
        member.begin_work(now)
        member.assigned.append(shards)
        member.phase = Phase.COMPUTING
        return [do.Send(peer, Assign(step=self.step, shards=shards))]

    def _replace(self, lost: Member, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        """Assign to `members` the shards that `lost` had not delivered or that are void now."""
        for block, missing in self._missing.items():
            missing.update(lost.covered.get(block, ()), lost.delivered)
        orphaned = [shard for shard in lost.to_send() if shard not in self._audits]
        audited = [shard for shard, audit in self._audits.items() if audit.forget(lost.in_rank())]
        assigned = self._assign(orphaned, members, now) if orphaned else []
        return [*assigned, *(effect for shard in audited for effect in self._pursue(shard, now))]

    # --- audits -----------------------------------------------------------------------------------

    def _ask(self, rank: int, shard: int, now: float) -> list[Effect]:
        """Assign an audited shard to `rank`; the message does not show that it is audited."""
        self._audits[shard].asked.append(rank)
        return self._give(self._ranks()[rank], (shard,), now)

    def _pursue(self, shard: int, now: float) -> list[Effect]:
        """Have two workers (or the only one) compute an audited shard, then compare the copies."""
        audit, effects = self._audits[shard], list[Effect]()
        while len(audit.asked) + len(audit.copies) < 2:
            rank = audit.second(self._witnesses(audit), self.step + shard)
            if rank is None:
                break
            effects += self._ask(rank, shard, now)
        return effects if audit.asked else [*effects, do.Compare(self.step, shard)]

    def _witnesses(self, audit: Audit) -> list[int]:
        """Return the ranks with the backend of earlier copies, if any.

        Different backends round differently.
        """
        members = {member.in_rank(): member for member in self._members().values()}
        used = {members[rank].backend for rank in (*audit.asked, *audit.copies)}
        return [rank for rank, member in members.items() if not used or member.backend in used]

    def _count_copy(self, shard: int, verdict: Verdict) -> list[Effect]:
        """End the audit of `shard`: the copy named by `verdict` counts."""
        for missing in self._missing.values():
            missing.discard(shard)
        return [self._end_audit(shard, verdict.copy, verdict.culprit)]

    def _end_audit(
        self, shard: int, copy: int | None = None, culprit: int | None = None
    ) -> do.Conclude:
        audit = self._audits.pop(shard)
        disputed = tuple(sorted(audit.disputed))
        return do.Conclude(self.step, shard, audit.alike, copy, culprit, disputed)

    def _release(self) -> list[Effect]:
        """When all audits are over, keep all deliveries and average every complete block."""
        if self._audits:
            return []
        kept = [keep for member in self._members().values() for keep in self._keep_whole(member)]
        blocks = sorted(self._missing, reverse=True)
        return [*kept, *(effect for block in blocks for effect in self._reduce(block))]

    # --- delivery ---------------------------------------------------------------------------------

    def _computed(self, peer: Peer, member: Member, message: Computed, now: float) -> list[Effect]:
        self._require_step(message.step)
        member.begin_delivery(message)
        self._measure(member, message, now)
        rank = member.in_rank()
        return [do.Keep(rank, message) if self._copied(member) is None else do.Copy(rank, message)]

    def _node(self, peer: Peer, member: Member, node: TreeNode, now: float) -> list[Effect]:
        self._require_step(node.step)
        under = reduction.shards_under(node.level, node.index, self.run.num_shards)
        member.take(node, under, range(self.run.num_blocks))
        if (shard := self._copied(member)) is not None:
            copy = do.Copy(member.in_rank(), node)
            return [copy, *self._end_copy(member, shard, now)] if member.is_whole(0) else [copy]
        effects = self._count(member, node, under)
        if member.is_whole(0):
            member.delivered += member.end_delivery()
            effects += self._keep_whole(member)
        return [*effects, *self._reduce(node.block)]

    def _measure(self, member: Member, message: Computed, now: float) -> None:
        seconds = member.end_work(now)
        self._pace.computed(member.in_rank(), len(message.shards), seconds)

    def _copied(self, member: Member) -> int | None:
        shard = member.assigned[0][0]
        return shard if shard in self._audits else None

    def _end_copy(self, member: Member, shard: int, now: float) -> list[Effect]:
        member.end_delivery()
        rank = member.in_rank()
        self._audits[shard].end_copy(rank)
        return [do.EndCopy(rank, shard), *self._pursue(shard, now)]

    def _count(self, member: Member, node: TreeNode, under: range) -> list[Effect]:
        if node.block not in self._missing:
            return []
        self._missing[node.block].difference_update(under)
        return [do.Keep(member.in_rank(), node)]

    def _reduce(self, block: int) -> list[Effect]:
        if self._missing.get(block) != set():
            return []
        del self._missing[block]
        self._reducing.add(block)
        return [do.Reduce(self.step, block)]

    def _keep_whole(self, member: Member) -> list[Effect]:
        """Keep the deliveries of `member` even if it leaves, unless it or an audit is at work."""
        if self._audits or member.delivering or not member.delivered:
            return []
        member.delivered.clear()
        return [do.Deliver(member.in_rank())]

    def _ranks(self) -> dict[int, Peer]:
        return {member.in_rank(): peer for peer, member in self._members().items()}

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step={step}: the run is at step {self.step}")
