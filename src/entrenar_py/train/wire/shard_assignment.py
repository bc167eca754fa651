"""Assigns the shards of the current step to workers, and counts what they deliver.

An audited shard is assigned to two workers, and counts when two agree on it. Nothing is averaged
until every audit of the step is over. If a worker leaves before that, all that it delivered for the
step is void: an audit might have shown that it was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.attendance import Attendance
from entrenar_py.train.wire.audits import Audit, Verdict
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.member import Member
from entrenar_py.train.wire.messages import Assign, Computed, TreeNode
from entrenar_py.train.wire.pace import Counts, Pace, proportional
from entrenar_py.train.wire.phases import PeerPhase as Phase
from entrenar_py.train.wire.terms import Run, Timing


class Dealing(Attendance):
    """Assigns the shards of one step at a time to the workers that take part."""

    def __init__(self, run: Run, *, secret: bytes, timing: Timing) -> None:
        super().__init__(run, secret=secret, timing=timing)
        self.step = run.first_step
        self._missing: dict[int, set[int]] = {}  # block -> shards not yet delivered
        self._reducing: set[int] = set()  # blocks that are delivered, and not yet averaged
        self._audits: dict[int, Audit] = {}  # shard -> its audit, while that is open
        self._pace = Pace()

    # --- assignment -------------------------------------------------------------------------------

    def _deal(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        """Assign all shards of the step, the audited ones to two workers each."""
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
        """Divide `shards` among `members`, adjacent ones to each, after what each has already.

        Each gets as many as `counts` says, by default after its speed.
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
        """Assign to `members` the shards that `lost` had not delivered, or that are void now."""
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
        """Return the ranks with the backend of earlier copies, if any; others round differently."""
        members = {member.in_rank(): member for member in self._members().values()}
        used = {members[rank].backend for rank in (*audit.asked, *audit.copies)}
        return [rank for rank, member in members.items() if not used or member.backend in used]

    def _count_copy(self, shard: int, verdict: Verdict) -> list[Effect]:
        """End the audit of `shard`: the copy that `verdict` names counts."""
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
        """Once all audits are over, keep what was delivered, and average every complete block."""
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
        """Return the audited shard that `member` is delivering a copy of; None if not audited."""
        shard = member.assigned[0][0]
        return shard if shard in self._audits else None

    def _end_copy(self, member: Member, shard: int, now: float) -> list[Effect]:
        member.end_delivery()
        rank = member.in_rank()
        self._audits[shard].end_copy(rank)
        return [do.EndCopy(rank, shard), *self._pursue(shard, now)]

    def _count(self, member: Member, node: TreeNode, under: range) -> list[Effect]:
        """Count the shards of a node as delivered, unless its block was complete already."""
        if node.block not in self._missing:
            return []
        self._missing[node.block].difference_update(under)
        return [do.Keep(member.in_rank(), node)]

    def _reduce(self, block: int) -> list[Effect]:
        """Request the average of `block` once every shard of it is delivered."""
        if self._missing.get(block) != set():
            return []
        del self._missing[block]
        self._reducing.add(block)
        return [do.Reduce(self.step, block)]

    def _keep_whole(self, member: Member) -> list[Effect]:
        """Keep what `member` delivered even if it leaves, unless an audit or delivery is open."""
        if self._audits or member.delivering or not member.delivered:
            return []
        member.delivered.clear()
        return [do.Deliver(member.in_rank())]

    def _ranks(self) -> dict[int, Peer]:
        return {member.in_rank(): peer for peer, member in self._members().items()}

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step={step}: the run is at step {self.step}")
