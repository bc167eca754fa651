"""The coordinator of a layer pipeline: each worker has a stage of the model.

It has the state, makes the steps, and sends each stage its new weights, as in a star whose server
makes the updates. Shards pass through all stages, from worker to worker. If a worker is lost or a
link breaks before a step is committed, the step did not happen: once every stage has a worker
again, a new round computes all of its shards anew, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import pipeline, terms
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.grouping import Grouping
from entrenar_py.train.wire.member import Member
from entrenar_py.train.wire.phases import PIPELINE_PEER_MAY_SAY, Stage
from entrenar_py.train.wire.phases import PeerPhase as Phase
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.terms import Run, Timing


class PipelineCoordinator(Grouping):
    """The state machine. Times are seconds on a monotonic clock."""

    may_say = PIPELINE_PEER_MAY_SAY

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing, now=now)
        assert run.places is not None, "a pipeline has places"
        assert run.server_updates, "its steps are made here"
        self.places: Places = run.places
        self._is_void = False  # whether the step has to begin anew
        self._unsuited: set[int] = set()  # ranks that the worker being admitted can't have

    # --- joining ----------------------------------------------------------------------------------

    def _admit(self, peer: Peer, member: Member, hello: say.Hello) -> list[Effect]:
        unsuited = self.places.unsuited(hello.backend)
        reason = self._mismatch(hello, unsuited)
        if hello.rank is None:
            unsuited = unsuited | self._named()
        ours, secret = self.run.terms, self.secret
        # The secret comes first: a stranger is not told what the stages are planned for.
        if reason and terms.refusal(hello, member.challenge, ours, secret=secret) is None:
            del self.peers[peer]
            refuse = say.Refuse(reason=reason, retry=False)
            return [do.Send(peer, refuse), do.Close(peer, f"refused: {reason}")]
        self._unsuited = unsuited
        effects = super()._admit(peer, member, hello)
        self._unsuited = set()
        return [self._with_name(effect, hello) for effect in effects]

    def _with_name(self, effect: Effect, hello: say.Hello) -> Effect:
        """Return `effect`; one that refuses a place says for which name it is kept."""
        match effect:
            case do.Send(message=say.Refuse(retry=True) as refuse) if hello.rank is not None:
                name = self.places.called(hello.rank)
                if name:
                    told = f"--id {name}: a live worker has that name; end it, or use another one"
                    return replace(effect, message=replace(refuse, reason=told))
        return effect

    def _mismatch(self, hello: say.Hello, unsuited: set[int]) -> str:
        """Return why no stage that the worker may have runs on its backend; "" if one does."""
        if hello.rank in unsuited:
            stage = self.places.stage_of(hello.rank)
            kind = self.places.backends[stage]
            return f"backend={hello.backend}: stage {stage} is planned for {kind}"
        if len(unsuited) == self.places.num_ranks:
            kinds = " and ".join(sorted({kind for kind in self.places.backends if kind}))
            return f"backend={hello.backend}: all stages are planned for {kinds}"
        ranks = range(self.places.num_ranks)
        if hello.rank is None and len(unsuited | self._named()) == self.places.num_ranks:
            names = ", ".join(self.places.called(rank) for rank in ranks if rank not in unsuited)
            return f"the stages are planned for workers by name: start it with --id, of {names}"
        return ""

    def _named(self) -> set[int]:
        """Return the ranks that are kept for workers by their names."""
        return {rank for rank in range(self.places.num_ranks) if self.places.called(rank)}

    def _barred(self) -> set[int]:
        return super()._barred() | self._unsuited

    # --- a step -----------------------------------------------------------------------------------

    def _summed(self, peer: Peer, member: Member, said: say.Summed, now: float) -> list[Effect]:
        if said.round != self._round:
            return []  # was on its way when the round ended
        self._require_step(said.step)
        passes = [(one.shard, one.is_forward) for one in pipeline.decode(said.times_us)]
        if len(set(passes)) < len(passes) or any(n >= self.run.num_shards for n, _ in passes):
            raise ProtocolError("Summed times_us: a pass twice, or of a shard that is not there")
        member.begin_delivery(said)
        return [do.Keep(member.in_rank(), said)]

    def _node(self, peer: Peer, member: Member, node: say.TreeNode, now: float) -> list[Effect]:
        if node.round != self._round:
            return []
        self._require_step(node.step)
        under = reduction.shards_under(node.level, node.index, self.run.num_shards)
        blocks = self._blocks_of(member)
        if node.block not in blocks:
            raise ProtocolError(f"TreeNode block={node.block}: it is another stage's")
        if not member.assigned:
            raise ProtocolError(f"TreeNode block={node.block}: nothing more is due")
        member.take(node, under, blocks)
        effects = self._count(member, node, under)
        if member.is_whole(blocks[0]):
            member.delivered += member.end_delivery()
            effects += self._keep_whole(member)
        return [*effects, *self._reduce(node.block)]

    def _staged(self, peer: Peer, member: Member, said: say.Staged, now: float) -> list[Effect]:
        if said.round != self._round:
            return []
        if member.phase is not Phase.STAGING:
            raise ProtocolError("Staged: its weights are not all sent")
        return super()._staged(peer, member, said, now)

    def _non_finite(
        self, peer: Peer, member: Member, said: say.NonFinite, now: float
    ) -> list[Effect]:
        if not any(said.shard in shards for shards in member.assigned):
            return []  # of a round that is over: its step is computed again, and says so again
        return super()._non_finite(peer, member, said, now)

    _turns: ClassVar[Mapping[type[say.Message], Callable[..., list[Effect]]]] = {
        **Grouping._turns,
        say.Summed: _summed,
        say.TreeNode: _node,
        say.Staged: _staged,
        say.NonFinite: _non_finite,
    }

    # --- how the run goes on ----------------------------------------------------------------------

    def _next(self, now: float) -> list[Effect] | None:
        if self._is_void:
            return self._gather(self.step, now)
        return super()._next(now)

    def _give_up(self, waited: float) -> list[Effect]:
        there = {member.in_rank() for member in self._members().values()}
        missing = [rank for rank in range(self.places.num_ranks) if rank not in there]
        told = ", ".join(self._described(rank) for rank in missing)
        reason = f"step {self.step} has waited {waited:.0f} s for workers; not here: {told}"
        return self._end(do.Finish("failed", reason), say.Shutdown(problem=say.brief(reason)))

    def _described(self, rank: int) -> str:
        name, stage = self.places.called(rank), self.places.stage_of(rank)
        return f"{name or f'rank {rank}'} (stage {stage})"

    def _gather(self, step: int, now: float) -> list[Effect]:
        self._is_void = False
        for member in self._members().values():
            member.start_over()
        return super()._gather(step, now)

    def _is_complete(self) -> bool:
        there = [member.in_rank() for member in self._members().values()]
        return not self.places.empty(there) and super()._is_complete()

    def _hand_out(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        self._begun, self.stage = True, Stage.COMPUTING
        shards = range(self.run.num_shards)
        self._missing = {block: set(shards) for block in range(self.run.num_blocks)}
        ranks = {member.in_rank() for member in members.values()}
        holders = self.places.holders(ranks, len(shards))
        is_told = list(members) == self._group
        effects = [] if is_told else self._begin_round(members, holders)
        for peer, member in members.items():
            stage = self.places.stage_of(member.in_rank())
            of_stage = holders[stage * len(shards) : (stage + 1) * len(shards)]
            own = tuple(shard for shard in shards if of_stage[shard] == member.in_rank())
            if own:
                effects += self._give(peer, own, now)
        return effects

    def _regroup(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        self._start_over()
        return self._settle(now)

    def _replace(self, lost: Member, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        self._forget_complaints()  # it may have been the cause of them
        self._start_over()
        return []

    def _start_over(self) -> None:
        """End the round, and begin its step anew unless that is committed.

        No other round gets its number, so what is still on its way has no effect, even while the
        run waits for a worker.
        """
        self._group = []
        self._round += 1
        self._is_void = self.stage in (Stage.COMPUTING, Stage.STAGING)

    def _spread(
        self, messages: Sequence[say.Average | say.Weights], *, last: bool, now: float
    ) -> list[Effect]:
        """Send the new weights of each stage to its workers."""
        sends: list[Effect] = [
            do.Send(peer, message)
            for peer, member in self._members().items()
            for message in messages
            if message.block in self._blocks_of(member)
        ]
        self.stage = Stage.STAGING
        for member in self._members().values():
            member.phase = Phase.STAGING
        return sends + self._settle(now)

    def _blocks_of(self, member: Member) -> range:
        return self.places.blocks[self.places.stage_of(member.in_rank())]
