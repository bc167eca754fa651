"""The coordinator of a star: who takes part, who computes what, and when a step is made.

A machine: it is told what came (a connection, a message, a tick of the clock, the end of work that
it asked for) and returns what is to be done (`effects`). A step goes

    gathering -> computing -> staging -> applying -> gathering (of the next step)

A block of the gradient is averaged as soon as it is there of every shard, and goes to everyone
while later blocks are still on their way. A step is made when everyone holds all blocks, and is
made here only when a worker said that it made it: if everyone dies before, the step did not happen,
and is computed again by whoever comes; the same bits come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import effects as do
from entrenar_py.protocol import terms
from entrenar_py.protocol.effects import Effect, Peer
from entrenar_py.protocol.member import Member
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


class Coordinator:
    """The machine. Times are seconds on any clock that does not go back."""

    may_say = PEER_MAY_SAY

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        self.run, self.secret, self.timing = run, secret, timing
        self.step, self.stage = run.first_step, Stage.GATHERING
        self.peers: dict[Peer, Member] = {}
        self._missing: dict[int, set[int]] = {}  # block -> shards not yet there
        self._reducing: set[int] = set()  # blocks that are there, and not yet averaged
        self._made = False  # whether some worker made `step`, and so it was made here
        self._begun = False
        self._saved: int | None = None  # the step before which there is a checkpoint
        self._stopping: str | None = None
        self._gathering_since = now

    # --- what is told to it -----------------------------------------------------------------------

    def connected(self, peer: Peer, nonce: str, now: float, host: str = "") -> list[Effect]:
        """A new connection, from `host`; `nonce` is 32 random hex digits."""
        if self.stage is Stage.OVER:
            return [do.Close(peer, "the run is over")]
        challenge = Challenge(version=VERSION, nonce=nonce)
        self.peers[peer] = Member(challenge, Phase.CHALLENGED, now, now, host=host)
        return [do.Send(peer, challenge)]

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
        legal = self.may_say[member.phase]
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

    def reduced(
        self, step: int, block: int, loss: float, weight: float, now: float
    ) -> list[Effect]:
        """`block` of the average of `step` is there and finite."""
        assert (self.stage, self.step) == (Stage.COMPUTING, step)
        self._reducing.remove(block)
        members = self._members()
        average = Average(step=step, round=0, block=block, loss=loss, weight=weight)
        told: list[Effect] = [do.Send(peer, average) for peer in members]
        if not (self._missing or self._reducing):
            self.stage = Stage.STAGING
            for member in members.values():
                member.phase = Phase.STAGING
        return told + self._settle(now)

    def refused(self, step: int, reason: str) -> list[Effect]:
        """What was reduced is not finite: nobody makes `step`."""
        return self._halt(do.Stop(step, None, reason))

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
                effects.append(do.Send(peer, Heartbeat()))
        waited = now - self._gathering_since
        if self.stage is Stage.GATHERING and waited >= self.timing.gather_s:
            there = sorted(member.in_rank() for member in self._members().values())
            reason = f"step {self.step} has waited {waited:.0f} s for workers; here are {there}"
            effects += self._end(do.Finish("failed", reason), Shutdown(problem=brief(reason)))
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
            return [do.Send(peer, answer), do.Close(peer, f"refused: {answer.reason}")]
        if isinstance(answer, terms.Answer):
            del self.peers[peer]  # it comes again when it has built what the run needs
            offer = do.Send(peer, terms.offer(self.timing, answer.proof))
            return [do.Secure(peer, answer.key), offer, do.Close(peer, "told what the run is")]
        member.rank, member.proof, member.phase = answer.rank, answer.proof, Phase.WAITING
        return [do.Secure(peer, answer.key), *self._settle(now)]

    def _loaded(self, peer: Peer, member: Member, loaded: Loaded, now: float) -> list[Effect]:
        self._require_step(loaded.step)
        member.phase = Phase.READY
        rank = member.in_rank()
        kept = [do.Joined(rank, self.step, late=self._begun), do.Keep(rank, loaded)]
        return [*kept, *self._settle(now)]

    # --- a step -----------------------------------------------------------------------------------

    def _computed(self, peer: Peer, member: Member, said: Computed, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.begin_delivery(said)
        return [do.Keep(member.in_rank(), said)]

    def _node(self, peer: Peer, member: Member, node: TreeNode, now: float) -> list[Effect]:
        self._require_step(node.step)
        under = reduction.shards_under(node.level, node.index, self.run.num_shards)
        member.take(node, under, self.run.num_blocks)
        effects = self._count(member, node, under)
        if member.is_whole(0):
            effects.append(do.Deliver(member.in_rank()))
            member.end_delivery()
        if self._missing.get(node.block) == set():
            del self._missing[node.block]
            self._reducing.add(node.block)
            effects.append(do.Reduce(self.step, node.block))
        return effects

    def _count(self, member: Member, node: TreeNode, under: range) -> list[Effect]:
        """Counts what is new in a node: nothing, of a block that is there already."""
        if node.block not in self._missing:
            return []
        self._missing[node.block].difference_update(under)
        return [do.Keep(member.in_rank(), node)]

    def _non_finite(self, peer: Peer, member: Member, said: NonFinite, now: float) -> list[Effect]:
        self._require_step(said.step)
        rank, reason = member.in_rank(), member.why_it_halts(said)
        return [do.Keep(rank, said), *self._halt(do.Stop(said.step, rank, reason, said))]

    def _staged(self, peer: Peer, member: Member, said: Staged, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.STAGED
        return self._settle(now)

    def _applied(self, peer: Peer, member: Member, said: Applied, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.READY
        first = [] if self._made else [do.Apply(self.step)]
        self._made = True
        return [*first, do.Keep(member.in_rank(), said), *self._settle(now)]

    def _leave(self, peer: Peer, member: Member, said: Leave, now: float) -> list[Effect]:
        return self._drop(peer, f"left: {said.reason}", now)

    _turns: ClassVar[Mapping[type[Message], Callable[..., list[Effect]]]] = {
        Hello: _hello,
        Loaded: _loaded,
        Computed: _computed,
        TreeNode: _node,
        NonFinite: _non_finite,
        Staged: _staged,
        Applied: _applied,
        Leave: _leave,
        Heartbeat: lambda *_: [],
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
        if self._is_staged() and phases == {Phase.STAGED}:
            return self._commit()
        if self.stage is Stage.APPLYING and Phase.APPLYING not in phases:
            return self._gather(self.step + 1, now)
        return None

    def _is_staged(self) -> bool:
        """Whether the whole average has gone to everyone."""
        return self.stage is Stage.STAGING

    def _commit(self) -> list[Effect]:
        self.stage = Stage.APPLYING
        return self._tell(Commit(step=self.step), Phase.APPLYING)

    def _gather(self, step: int, now: float) -> list[Effect]:
        self.step, self.stage = step, Stage.GATHERING
        self._gathering_since, self._made = now, False
        self._reducing.clear()
        return [do.Gather(step)]

    def _begin(self, now: float) -> list[Effect] | None:
        """Saves if it is time, lets in who waits, then hands out the step; None to wait."""
        over = self.step == self.run.num_steps
        waiting = {p: m for p, m in self.peers.items() if m.phase is Phase.WAITING and not over}
        due = self.step in self.run.saves and self.step != self._saved
        if (waiting or due) and not self._has_state():
            return self._fetch(now)
        if due:
            self._saved = self.step
            return [do.Save(self.step)]
        if over:
            return self._end(do.Finish("completed"), Shutdown(problem=None))
        if self._stopping is not None:
            return self._stopped(self.step, self._stopping)
        for member in waiting.values():
            member.phase = Phase.LOADING
        if waiting:
            self._gathering_since = now  # who was let in has its own time to load
            return [do.Send(peer, self._welcome(member)) for peer, member in waiting.items()]
        members = self._members()
        there = {member.rank for member in members.values()}
        loading = any(member.phase is Phase.LOADING for member in self.peers.values())
        too_few = len(there) < (1 if self._begun else self.run.num_awaited)
        if loading or too_few or not there.issuperset(self.run.awaited.get(self.step, ())):
            return None
        return self._hand_out(members)

    def _has_state(self) -> bool:
        """Whether the state before `step` is here."""
        return True

    def _fetch(self, now: float) -> list[Effect] | None:
        """Gets it; None while it is on its way."""
        raise AssertionError("the coordinator of a star has it")

    def _hand_out(self, members: Mapping[Peer, Member]) -> list[Effect]:
        """Begins the step."""
        self._begun, self.stage = True, Stage.COMPUTING
        shards = range(self.run.num_shards)
        self._missing = {block: set(shards) for block in range(self.run.num_blocks)}
        return self._assign(shards, members)

    def _assign(self, shards: Sequence[int], members: Mapping[Peer, Member]) -> list[Effect]:
        """Hands `shards` out in runs; a member that has some takes more behind them."""
        peer_of = {member.in_rank(): peer for peer, member in members.items()}
        effects: list[Effect] = []
        for rank, run in sharding.runs(shards, peer_of).items():
            if run:
                member = members[peer_of[rank]]
                member.assigned.append(tuple(run))
                member.phase = Phase.COMPUTING
                effects.append(do.Send(peer_of[rank], Assign(step=self.step, shards=tuple(run))))
        return effects

    def _drop(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Ends a connection, for whatever reason, and goes on without it."""
        member = self.peers.pop(peer)
        effects: list[Effect] = [do.Close(peer, reason)]
        if member.phase in MEMBERS and self.stage is not Stage.OVER:
            effects.append(do.Left(member.in_rank(), self.step, reason))
            members = self._members()
            if members:
                effects += self._replace(member, members)
        return [*effects, *self._settle(now)]

    def _replace(self, lost: Member, members: Mapping[Peer, Member]) -> list[Effect]:
        """Gives to `members` what `lost` had to deliver, and had not wholly."""
        for block, came in lost.covered.items():
            if block in self._missing:
                self._missing[block].update(came)
        orphaned = [shard for shards in lost.assigned for shard in shards]
        return self._assign(orphaned, members) if orphaned else []

    def _halt(self, stop: do.Stop) -> list[Effect]:
        halt = Halt(step=stop.step, reason=brief(stop.reason))
        return [stop, *self._end(do.Finish("halted", stop.reason), halt)]

    def _stopped(self, step: int, reason: str) -> list[Effect]:
        farewell = Shutdown(problem=brief(reason))
        saved = [do.Save(step)] if self._has_state() else []
        return [*saved, *self._end(do.Finish("stopped", reason), farewell)]

    def _end(self, finish: do.Finish, farewell: Message) -> list[Effect]:
        """Tells everyone who was let in, and ends every connection."""
        self.stage = Stage.OVER
        there = [peer for peer, m in self.peers.items() if m.phase is not Phase.CHALLENGED]
        told = [do.Send(peer, farewell) for peer in there]
        closed = [do.Close(peer, finish.reason or finish.status) for peer in self.peers]
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
        return [do.Send(peer, message) for peer in members]

    def _welcome(self, member: Member) -> Welcome:
        resumed = self.run.resumed and not self._begun
        rank, proof = member.in_rank(), member.proof
        return Welcome(
            rank=rank, step=self.step, blocks=self.run.num_blocks, resumed=resumed, proof=proof
        )

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise ProtocolError(f"step={step}: the run is at step {self.step}")
