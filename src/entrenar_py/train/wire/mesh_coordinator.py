"""The coordinator of a mesh: it directs workers that send blocks directly to each other.

As in a star, a step is computed, staged by every worker, and then applied. However, all results of
a lost worker are lost with it: other workers compute its shards again, and the exchange restarts in
a new round. Only the workers hold the current state. The coordinator requests it from one of them
to write a checkpoint or to admit a worker. If all connections break at once, it asks the workers
that reconnect, one at a time, whether they still hold the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.attendance import Member
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import MEMBERS, MESH_PEER_MAY_SAY, Stage
from entrenar_py.train.wire.messages import PeerPhase as Phase
from entrenar_py.train.wire.terms import Run, Timing

ROUNDS_MAX = 3  # complaints in a step at which a worker is expelled


class Grouping(Coordinator):
    """The part of a coordinator's state machine that meshes, rings and pipelines share.

    All messages between workers belong to a round. A round ends when a worker leaves or joins, or
    when a link between two workers breaks.
    """

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing, now=now)
        self._round = 0
        self._group: list[Peer] = []  # the workers of this round
        self._complaints: Counter[Peer] = Counter()  # by and about each worker, this step
        self._num_rounds = 0  # complaints in this step; those from both ends of a link count as one
        self._told: tuple[int, int] | None = None  # the last complaint: its sender and its subject

    def _hello(self, peer: Peer, member: Member, hello: say.Hello, now: float) -> list[Effect]:
        ours, secret = self.run.terms, self.secret
        entitled = terms.refusal(hello, member.challenge, ours, secret=secret) is None
        if entitled and hello.port is None:  # `super` answers peers without a proof, and applicants
            raise ProtocolError("Hello port=null: in a mesh every worker has to listen")
        host = f"[{member.host}]" if ":" in member.host else member.host
        member.address = f"{host}:{hello.port}"
        return super()._hello(peer, member, hello, now)

    def _unreachable(
        self, peer: Peer, member: Member, said: say.Unreachable, now: float
    ) -> list[Effect]:
        """Begin another round; at the third complaint, expel the worker that most complaints name.

        Both ends may complain about the same broken connection: the second complaint then arrives
        in the round that the first one started. Such a pair counts once.
        """
        if said.round != self._round:
            return []
        if self.stage is not Stage.COMPUTING:
            self._group = []  # so the next step begins a new round
            return []
        rank_of = {member.in_rank(): peer for peer, member in self._members().items()}
        self._complaints.update([peer, rank_of.get(said.rank)])
        del self._complaints[None]
        ends = member.in_rank(), said.rank
        is_second = self._told == ends[::-1]
        self._told = None if is_second else ends
        self._num_rounds += not is_second
        if self._num_rounds < ROUNDS_MAX:
            return self._regroup(self._members(), now)
        worst = max(rank_of, key=lambda rank: (self._complaints[rank_of[rank]], rank))
        reason = f"worker {member.in_rank()} can't reach worker {said.rank}: {said.reason}"
        return self._throw_out(rank_of[worst], reason, now)

    _turns: ClassVar[Mapping[type[say.Message], Callable[..., list[Effect]]]] = {
        **Coordinator._turns,
        say.Hello: _hello,
        say.Unreachable: _unreachable,
    }

    def _regroup(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        raise NotImplementedError

    def _begin_round(self, members: Mapping[Peer, Member], holders: list[int]) -> list[Effect]:
        """Return the messages that begin a new round with `members`; `holders` is as in `Group`."""
        self._round += 1
        self._group = list(members)
        addresses = {member.in_rank(): member.address for member in members.values()}
        ranks = sorted(addresses)
        group = say.Group(
            step=self.step,
            round=self._round,
            holders=tuple(holders),
            ranks=tuple(ranks),
            addresses=tuple(addresses[rank] for rank in ranks),
        )
        return [do.Send(peer, group) for peer in members]

    def _gather(self, step: int, now: float) -> list[Effect]:
        if step > self.step or not self._members():  # otherwise the same workers may complain again
            self._forget_complaints()
        return super()._gather(step, now)

    def _forget_complaints(self) -> None:
        self._complaints.clear()
        self._num_rounds, self._told = 0, None


class MeshCoordinator(Grouping):
    """The state machine of a mesh's coordinator. Times are seconds on a monotonic clock."""

    may_say = MESH_PEER_MAY_SAY

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing, now=now)
        self._holders: dict[int, int] = {}  # shard -> rank, as in the last Group
        self._held = run.first_step  # the step before which the coordinator has the state
        self._may_hold: set[int] = set()  # ranks lost since the step was handed out
        self._committed = False  # all were told to apply the current step, then all were lost

    # --- a step -----------------------------------------------------------------------------------

    def _computed(self, peer: Peer, member: Member, said: say.Computed, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.require_assigned(said)
        self._measure(member, said, now)
        member.delivered += member.assigned.pop(0)
        if not member.assigned:
            member.phase = Phase.READY
        return [do.Keep(member.in_rank(), said), *self._settle(now)]

    def _staged(self, peer: Peer, member: Member, said: say.Staged, now: float) -> list[Effect]:
        self._require_step(said.step)
        if said.round == self._round:  # and was not sent before the round ended
            if member.assigned:
                raise ProtocolError(f"Staged: its shards {member.assigned[0]} are not computed yet")
            member.phase = Phase.STAGED
        return self._settle(now)

    def _applied(self, peer: Peer, member: Member, said: say.Applied, now: float) -> list[Effect]:
        self._require_step(said.step)
        if member.phase is Phase.ASKED:
            return self._made_before(member, said, now)
        member.phase = Phase.READY
        self._made = True
        return [do.Keep(member.in_rank(), said), *self._settle(now)]

    def _made_before(self, member: Member, said: say.Applied, now: float) -> list[Effect]:
        """Continue with the next step: a returning worker has applied this one, as committed."""
        if not self._committed:
            raise ProtocolError(f"Applied step={said.step}: no worker was told to make this step")
        member.phase = Phase.WAITING
        kept = do.Keep(member.in_rank(), said)
        return [kept, *self._gather(self.step + 1, now), *self._settle(now)]

    def _overflow(self, peer: Peer, member: Member, said: say.Overflow, now: float) -> list[Effect]:
        self._require_step(said.step)
        reason = "the average gradient or loss is not finite, though each worker's is"
        return self._halt(do.Stop(said.step, None, reason))

    def _state(self, peer: Peer, member: Member, said: say.State, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.WAITING if member.phase is Phase.ASKED else Phase.READY
        self._held = self.step
        return [do.Keep(member.in_rank(), said), *self._settle(now)]

    def _leave(self, peer: Peer, member: Member, said: say.Leave, now: float) -> list[Effect]:
        if member.phase is Phase.ASKED:  # that worker does not hold the state
            self._may_hold.discard(member.in_rank())
            if not self._may_hold:
                return self._lost_state()
        return super()._leave(peer, member, said, now)

    _turns: ClassVar[Mapping[type[say.Message], Callable[..., list[Effect]]]] = {
        **Grouping._turns,
        say.Computed: _computed,
        say.Staged: _staged,
        say.Applied: _applied,
        say.Overflow: _overflow,
        say.State: _state,
        say.Leave: _leave,
    }

    # --- the next move of the run -----------------------------------------------------------------

    def _is_staged(self) -> bool:
        return self.stage is Stage.COMPUTING

    def _commit(self) -> list[Effect]:
        members = self._members().values()
        return [*(do.Deliver(member.in_rank()) for member in members), *super()._commit()]

    def _gather(self, step: int, now: float) -> list[Effect]:
        self._committed = step == self.step and self.stage is Stage.APPLYING
        for member in self.peers.values():
            member.delivered.clear()
        return super()._gather(step, now)

    def _has_state(self, step: int) -> bool:
        return self._held == step

    def _begin(self, now: float) -> list[Effect] | None:
        if self._members() or self._has_state(self.step):
            return super()._begin(now)
        if self._stopping is not None:
            return self._stopped(self.step, self._stopping)
        waiting = self._peers_in(Phase.WAITING)
        if self._peers_in(Phase.ASKED) or not waiting:
            return None
        peer, member = next(iter(waiting.items()))
        member.phase = Phase.ASKED
        return [do.Send(peer, say.Fetch(step=self.step))]

    def _give_up(self, waited: float) -> list[Effect]:
        is_lost = not (self._members() or self._has_state(self.step))
        return self._lost_state() if is_lost else super()._give_up(waited)

    def _lost_state(self) -> list[Effect]:
        reason = (
            f"no worker is left that holds the state before step {self.step}: "
            "go on from the last checkpoint"
        )
        return self._end(do.Finish("failed", reason), say.Shutdown(problem=say.brief(reason)))

    def _drop(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if self.peers[peer].phase in MEMBERS:
            self._may_hold.add(self.peers[peer].in_rank())
        return super()._drop(peer, reason, now)

    def _fetch(self, now: float) -> list[Effect] | None:
        if self._peers_in(Phase.GIVING):
            return None
        peer, giver = next(iter(self._members().items()))
        giver.phase = Phase.GIVING
        return [do.Send(peer, say.Fetch(step=self.step))]

    def _hand_out(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        self._may_hold.clear()
        assigned = super()._hand_out(members, now)
        is_told = list(members) == self._group and _holders(members) == self._holders
        return assigned if is_told else [*self._regroup(members, now), *assigned]

    def _replace(self, lost: Member, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        if self.stage is not Stage.COMPUTING:
            return []
        orphaned = [*lost.delivered, *(shard for shards in lost.assigned for shard in shards)]
        assigned = self._assign(sorted(orphaned), members, now)
        return [*self._regroup(members, now), *assigned]

    def _regroup(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        for member in members.values():
            if member.phase is Phase.STAGED:
                member.phase = Phase.READY
        self._holders = _holders(members)
        holders = [self._holders[shard] for shard in range(self.run.num_shards)]
        return self._begin_round(members, holders)


def _holders(members: Mapping[Peer, Member]) -> dict[int, int]:
    return {shard: one.in_rank() for one in members.values() for shard in one.to_send()}
