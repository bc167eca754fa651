"""The coordinator of a star: who takes part, who computes what, and when a step is made.

A machine: it is told what came (a connection, a message, a tick of the clock, the end of work that
it asked for) and returns what is to be done (`effects`). A step goes

    gathering -> computing -> reducing -> staging -> applying -> gathering (of the next step)

and is made here only when a worker said that it made it: if everyone dies before, the step did not
happen, and is computed again by whoever comes; the same bits come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import terms
from entrenar_py.protocol.effects import (
    Apply,
    Close,
    Effect,
    Finish,
    Gather,
    Joined,
    Keep,
    Left,
    Peer,
    Reduce,
    Save,
    Secure,
    Send,
    Stop,
)
from entrenar_py.protocol.messages import (
    VERSION,
    Applied,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Halt,
    Heartbeat,
    Hello,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Refuse,
    Shutdown,
    Staged,
    TreeNode,
    Welcome,
    brief,
)
from entrenar_py.protocol.phases import ALWAYS, MEMBERS, PEER_MAY_SAY, Stage
from entrenar_py.protocol.phases import PeerPhase as Phase
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.training import reduction, sharding


@dataclass(slots=True)
class Member:
    """One connection. `rank` is known once it was let in; `nodes` are those of its open shards."""

    challenge: Challenge
    phase: Phase
    heard: float
    said: float  # when it was last told that we live
    rank: int | None = None
    proof: str = ""  # ours, for its welcome
    assigned: list[tuple[int, ...]] = field(default_factory=list)  # and not delivered
    covered: set[int] = field(default_factory=set)  # shards under the nodes of those that came

    def in_rank(self) -> int:
        """The rank of one that was let in."""
        assert self.rank is not None
        return self.rank


class Coordinator:
    """The machine. Times are seconds on any clock that does not go back."""

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        self.run, self.secret, self.timing = run, secret, timing
        self.step = run.first_step
        self.stage = Stage.GATHERING
        self.peers: dict[Peer, Member] = {}
        self._made = False  # whether some worker made `step`, and so it was made here
        self._begun = False
        self._stopping: str | None = None
        self._gathering_since = now

    # --- what is told to it -----------------------------------------------------------------------

    def connected(self, peer: Peer, nonce: str, now: float) -> list[Effect]:
        """A new connection; `nonce` is 32 random hex digits."""
        if self.stage is Stage.OVER:
            return [Close(peer, "the run is over")]
        challenge = Challenge(version=VERSION, nonce=nonce)
        self.peers[peer] = Member(challenge, Phase.CHALLENGED, heard=now, said=now)
        return [Send(peer, challenge)]

    def heard(self, peer: Peer, now: float) -> None:
        """A whole frame came from `peer`, whatever it is part of; a stranger gains no time."""
        member = self.peers.get(peer)
        if member is not None and member.phase is not Phase.CHALLENGED:
            member.heard = now

    def receive(self, peer: Peer, message: Message, now: float) -> list[Effect]:
        """A whole message. What is not legal now ends that connection, and nothing else."""
        member = self.peers.get(peer)
        if member is None:
            return []  # closed from here, while this was on its way
        member.heard = now
        legal = PEER_MAY_SAY[member.phase]
        if member.phase is not Phase.CHALLENGED:
            legal += ALWAYS
        try:
            if not isinstance(message, legal):
                raise ProtocolError(f"{type(message).__name__} from a peer that is {member.phase}")
            return self._turns[type(message)](self, peer, member, message, now)
        except ProtocolError as error:
            return self._drop(peer, str(error), now)

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """The connection is gone, or what came over it made no sense."""
        return self._drop(peer, reason, now) if peer in self.peers else []

    def reduced(self, step: int, loss: float, weight: float, now: float) -> list[Effect]:
        """The average of `step` is there and finite."""
        assert (self.stage, self.step) == (Stage.REDUCING, step)
        self.stage = Stage.STAGING
        average = Average(step=step, loss=loss, weight=weight)
        return self._tell(average, Phase.STAGING) + self._settle(now)

    def refused(self, step: int, reason: str) -> list[Effect]:
        """What was reduced is not finite: nobody makes `step`."""
        return self._halt(Stop(step, None, reason))

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: heartbeats to send, peers to give up, a run to give up."""
        effects: list[Effect] = []
        for peer in [peer for peer, m in self.peers.items() if self._is_silent(m, now)]:
            if peer in self.peers:  # the run may end with the first of them
                silence = now - self.peers[peer].heard
                effects += self._drop(peer, f"silent for {silence:.1f} s", now)
        for peer, member in self.peers.items():
            told = member.phase is Phase.CHALLENGED or now - member.said < self.timing.heartbeat_s
            if not told:
                member.said = now
                effects.append(Send(peer, Heartbeat()))
        waited = now - self._gathering_since
        if self.stage is Stage.GATHERING and waited >= self.timing.gather_s:
            there = sorted(member.in_rank() for member in self._members().values())
            reason = f"step {self.step} has waited {waited:.0f} s for workers; here are {there}"
            effects += self._end(Finish("failed", reason), Shutdown(problem=brief(reason)))
        return effects

    def stop(self, reason: str, now: float, *, at_once: bool = False) -> list[Effect]:
        """Ends the run before its next step, with a checkpoint, and tells the workers why.

        The step in work is finished first; `at_once` gives it up.
        """
        if self.stage is Stage.OVER:
            return []
        self._stopping = reason
        return self._stopped(self.step + self._made, reason) if at_once else self._settle(now)

    # --- joining ----------------------------------------------------------------------------------

    def _hello(self, peer: Peer, member: Member, hello: Hello, now: float) -> list[Effect]:
        answer = terms.admit(
            hello,
            member.challenge,
            self.run.terms,
            secret=self.secret,
            world_size=self.run.world_size,
            taken={other.rank for other in self.peers.values()},
        )
        if isinstance(answer, Refuse):
            del self.peers[peer]
            return [Send(peer, answer), Close(peer, f"refused: {answer.reason}")]
        if isinstance(answer, terms.Answer):
            del self.peers[peer]  # it comes again when it has built what the run needs
            offer = Send(peer, terms.offer(self.timing, answer.proof))
            return [Secure(peer, answer.key), offer, Close(peer, "told what the run is")]
        member.rank, member.proof, member.phase = answer.rank, answer.proof, Phase.WAITING
        return [Secure(peer, answer.key), *self._settle(now)]

    def _loaded(self, peer: Peer, member: Member, loaded: Loaded, now: float) -> list[Effect]:
        self._require_step(loaded.step)
        member.phase = Phase.READY
        rank = member.in_rank()
        kept = [Joined(rank, self.step, late=self._begun), Keep(rank, loaded)]
        return [*kept, *self._settle(now)]

    # --- a step -----------------------------------------------------------------------------------

    def _node(self, peer: Peer, member: Member, node: TreeNode, now: float) -> list[Effect]:
        self._require_step(node.step)
        num_shards = self.run.num_shards
        top = reduction.height(num_shards)
        width = 1 << min(node.level, top)
        under = range(node.index * width, min((node.index + 1) * width, num_shards))
        # Of the first delivery that is open: what is lost with a worker is whole deliveries.
        owed = set(member.assigned[0]) - member.covered
        if node.level > top or not under or not owed.issuperset(under):
            raise ProtocolError(
                f"TreeNode level={node.level} index={node.index}: its shards are not all owed"
            )
        member.covered.update(under)
        return [Keep(member.in_rank(), node)]

    def _computed(self, peer: Peer, member: Member, said: Computed, now: float) -> list[Effect]:
        self._require_step(said.step)
        if said.shards != member.assigned[0] or not member.covered.issuperset(said.shards):
            raise ProtocolError(f"Computed shards={said.shards}: not assigned, or not delivered")
        del member.assigned[0]
        member.covered.clear()
        if not member.assigned:
            member.phase = Phase.READY
        return [Keep(member.in_rank(), said), *self._settle(now)]

    def _non_finite(self, peer: Peer, member: Member, said: NonFinite, now: float) -> list[Effect]:
        self._require_step(said.step)
        if said.shard not in member.assigned[0]:
            raise ProtocolError(f"NonFinite shard={said.shard}: it was not assigned")
        rank = member.in_rank()
        what = f"loss {said.loss}"
        if said.tensor is not None:
            what = f"gradient {said.tensor}[{said.element}]"
        reason = (
            f"non-finite {what} on worker {rank}, step {said.step}, shard {said.shard}: "
            "training halted before any update"
        )
        return [Keep(rank, said), *self._halt(Stop(said.step, rank, reason, said))]

    def _staged(self, peer: Peer, member: Member, said: Staged, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.STAGED
        return self._settle(now)

    def _applied(self, peer: Peer, member: Member, said: Applied, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.READY
        first = [] if self._made else [Apply(self.step)]
        self._made = True
        return [*first, Keep(member.in_rank(), said), *self._settle(now)]

    def _leave(self, peer: Peer, member: Member, said: Leave, now: float) -> list[Effect]:
        return self._drop(peer, f"left: {said.reason}", now)

    def _heartbeat(self, *_: object) -> list[Effect]:
        return []

    _turns: ClassVar[Mapping[type[Message], Callable[..., list[Effect]]]] = {
        Hello: _hello,
        Loaded: _loaded,
        TreeNode: _node,
        Computed: _computed,
        NonFinite: _non_finite,
        Staged: _staged,
        Applied: _applied,
        Leave: _leave,
        Heartbeat: _heartbeat,
    }

    # --- how the run goes on ----------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        """Goes on as far as who is where allows."""
        effects: list[Effect] = []
        while (turn := self._next(now)) is not None:
            effects += turn
        return effects

    def _next(self, now: float) -> list[Effect] | None:
        """One move of the run; None while it has to wait."""
        members = self._members()
        if self.stage is Stage.OVER:
            return None
        if not members and self.stage is not Stage.GATHERING:
            # Everyone died. What was made is made; what was not is done again by whoever comes.
            return self._gather(self.step + self._made, now)
        phases = {member.phase for member in members.values()}
        if self.stage is Stage.GATHERING:
            return self._begin(now)
        if self.stage is Stage.COMPUTING and Phase.COMPUTING not in phases:
            self.stage = Stage.REDUCING
            return [Reduce(self.step)]
        if self.stage is Stage.STAGING and phases == {Phase.STAGED}:
            self.stage = Stage.APPLYING
            return self._tell(Commit(step=self.step), Phase.APPLYING)
        if self.stage is Stage.APPLYING and Phase.APPLYING not in phases:
            return self._gather(self.step + 1, now)
        return None

    def _gather(self, step: int, now: float) -> list[Effect]:
        self.step, self.stage = step, Stage.GATHERING
        self._gathering_since, self._made = now, False
        return [Gather(step), *([Save(step)] if step in self.run.saves else [])]

    def _begin(self, now: float) -> list[Effect] | None:
        """Lets in who waits, then hands out the step; None while there is someone to wait for."""
        if self.step == self.run.num_steps:
            return self._end(Finish("completed"), Shutdown(problem=None))
        if self._stopping is not None:
            return self._stopped(self.step, self._stopping)
        waiting = {p: m for p, m in self.peers.items() if m.phase is Phase.WAITING}
        for member in waiting.values():
            member.phase = Phase.LOADING
        if waiting:
            self._gathering_since = now  # who was let in has its own time to load
            return [Send(peer, self._welcome(member)) for peer, member in waiting.items()]
        members = self._members()
        there = {member.rank for member in members.values()}
        loading = any(member.phase is Phase.LOADING for member in self.peers.values())
        too_few = len(there) < (1 if self._begun else self.run.num_awaited)
        if loading or too_few or not there.issuperset(self.run.awaited.get(self.step, ())):
            return None
        self._begun, self.stage = True, Stage.COMPUTING
        return self._assign(range(self.run.num_shards), members)

    def _assign(self, shards: Sequence[int], members: Mapping[Peer, Member]) -> list[Effect]:
        """Hands `shards` out in runs; a member that has some takes more behind them."""
        peer_of = {member.in_rank(): peer for peer, member in members.items()}
        effects: list[Effect] = []
        for rank, run in sharding.runs(shards, peer_of).items():
            if run:
                member = members[peer_of[rank]]
                member.assigned.append(tuple(run))
                member.phase = Phase.COMPUTING
                effects.append(Send(peer_of[rank], Assign(step=self.step, shards=tuple(run))))
        return effects

    def _drop(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Ends a connection, for whatever reason, and goes on without it."""
        member = self.peers.pop(peer)
        effects: list[Effect] = [Close(peer, reason)]
        if member.phase in MEMBERS and self.stage is not Stage.OVER:
            effects.append(Left(member.in_rank(), self.step, reason))
            orphaned = [shard for shards in member.assigned for shard in shards]
            members = self._members()
            if orphaned and members:
                effects += self._assign(orphaned, members)
        return [*effects, *self._settle(now)]

    def _halt(self, stop: Stop) -> list[Effect]:
        halt = Halt(step=stop.step, reason=brief(stop.reason))
        return [stop, *self._end(Finish("halted", stop.reason), halt)]

    def _stopped(self, step: int, reason: str) -> list[Effect]:
        farewell = Shutdown(problem=brief(reason))
        return [Save(step), *self._end(Finish("stopped", reason), farewell)]

    def _end(self, finish: Finish, farewell: Message) -> list[Effect]:
        """Tells everyone who was let in, and ends every connection."""
        self.stage = Stage.OVER
        there = [peer for peer, m in self.peers.items() if m.phase is not Phase.CHALLENGED]
        told = [Send(peer, farewell) for peer in there]
        closed = [Close(peer, finish.reason or finish.status) for peer in self.peers]
        self.peers.clear()
        return [*told, *closed, finish]

    # --- small things -----------------------------------------------------------------------------

    def _is_silent(self, member: Member, now: float) -> bool:
        stranger = member.phase is Phase.CHALLENGED
        patience = self.timing.hello_s if stranger else self.timing.dead_after_s
        return now - member.heard >= patience

    def _members(self) -> dict[Peer, Member]:
        return {peer: m for peer, m in self.peers.items() if m.phase in MEMBERS}

    def _tell(self, message: Message, phase: Phase) -> list[Effect]:
        """Sends `message` to every member, which is in `phase` then."""
        members = self._members()
        for member in members.values():
            member.phase = phase
        return [Send(peer, message) for peer in members]

    def _welcome(self, member: Member) -> Welcome:
        resumed = self.run.resumed and not self._begun
        rank, proof = member.in_rank(), member.proof
        return Welcome(rank=rank, step=self.step, resumed=resumed, proof=proof)

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step={step}: the run is at step {self.step}")
