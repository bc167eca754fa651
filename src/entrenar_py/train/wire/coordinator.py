"""The coordinator of a star: admits workers, assigns shards, and commits steps.

It is a state machine: its methods take events (a connection, a message, a tick of the clock, the
result of work that it requested) and return `effects`. A step passes through these stages:

    gathering -> computing -> staging -> applying -> gathering (of the next step)

A block of the gradient is averaged as soon as it has arrived for every shard. The average is sent
to every worker while later blocks are still arriving. The step is committed when all workers hold
all blocks. The coordinator applies it as soon as one worker reports that it has applied it. If all
workers are lost before that, the step did not happen and is computed again, with the same bits. A
coordinator that applies the optimizer itself (`Run.server_updates`) computes new weights when all
blocks are averaged and sends them instead of the average. It uses them as soon as one worker
reports that it has applied the step.

A checkpoint is written between two steps, in the background: the run waits for it, but workers get
heartbeats meanwhile, however long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import shard_assignment
from entrenar_py.train.wire.attendance import THROWN_OUT_MAX, Expulsions, Member, problem
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import ALWAYS, MEMBERS, PEER_MAY_SAY, Stage
from entrenar_py.train.wire.messages import PeerPhase as Phase
from entrenar_py.train.wire.shard_assignment import Dealing
from entrenar_py.train.wire.terms import Run, Timing


class Coordinator(Dealing):
    """The coordinator's state machine. Times are seconds on a monotonic clock."""

    may_say = PEER_MAY_SAY

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing)
        self.stage = Stage.GATHERING
        self._made = False  # whether some worker applied `step`, so that it was applied here, too
        self._begun = False
        self._thrown_out = Expulsions()  # since the last step was applied
        self._saved: int | None = None  # the step before which there is a checkpoint
        self._saving = False
        self._finish: do.Finish | None = None  # the run's, once its last state is saved
        self._stopping: str | None = None
        self._gathering_since = now

    # --- events -----------------------------------------------------------------------------------

    def connected(self, peer: Peer, nonce: str, now: float, host: str = "") -> list[Effect]:
        """Return the effects of a new connection from `host`; `nonce` has 32 random hex digits."""
        if self.stage is Stage.OVER:
            return [do.Close(peer, "the run is over")]
        return self._challenge(peer, nonce, now, host)

    def receive(self, peer: Peer, message: say.Message, now: float) -> list[Effect]:
        """Return the effects of a whole message.

        An illegal message ends the connection to `peer`.
        """
        member = self.peers.get(peer)
        if member is None:
            return []  # this coordinator closed the connection while the message was on its way
        member.heard = now
        legal = self.may_say[member.phase]
        if member.phase is not Phase.CHALLENGED:
            legal += ALWAYS
        try:
            if not isinstance(message, legal):
                raise ProtocolError(f"{type(message).__name__} from a peer that is {member.phase}")
            return self._turns[type(message)](self, peer, member, message, now)
        except ProtocolError as error:
            return self._throw_out(peer, str(error), now)

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Return the effects of a lost connection to `peer`."""
        return self._drop(peer, reason, now) if peer in self.peers else []

    def broken(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Return the effects that disconnect a peer that sent malformed bytes."""
        return self._throw_out(peer, reason, now) if peer in self.peers else []

    def reduced(
        self, step: int, block: int, loss: float, weight: float, now: float
    ) -> list[Effect]:
        """Return the effects of a finite average: send it, or compute new weights."""
        assert (self.stage, self.step) == (Stage.COMPUTING, step)
        self._reducing.remove(block)
        last = not (self._missing or self._reducing)
        if self.run.server_updates:
            return [do.Prepare(step)] if last else []
        average = say.Average(step=step, round=0, block=block, loss=loss, weight=weight)
        return self._spread([average], last=last, now=now)

    def prepared(self, step: int, loss: float, weight: float, now: float) -> list[Effect]:
        """Return the effects of a completed Prepare: the new weights are sent to all workers."""
        assert (self.stage, self.step) == (Stage.COMPUTING, step)
        assert not self._missing
        assert not self._reducing
        blocks = reversed(range(self.run.num_blocks))
        weights = [say.Weights(step=step, block=b, loss=loss, weight=weight) for b in blocks]
        return self._spread(weights, last=True, now=now)

    def _spread(
        self, messages: Sequence[say.Average | say.Weights], *, last: bool, now: float
    ) -> list[Effect]:
        """Send `messages` to all workers; if no block is left after them (`last`), await Staged."""
        members = self._members()
        sends: list[Effect] = [do.Send(peer, message) for message in messages for peer in members]
        if last:
            self.stage = Stage.STAGING
            for member in members.values():
                member.phase = Phase.STAGING
        return sends + self._settle(now)

    def compared(
        self, step: int, shard: int, ranks: Sequence[int], alike: Sequence[int], now: float
    ) -> list[Effect]:
        """Return the effects of the result of Compare.

        `ranks` has the rank of each copy, `alike` the index of the first copy with the same bits.
        """
        audit = self._audits.get(shard) if self.stage is Stage.COMPUTING else None
        if audit is None or audit.asked or audit.copies != list(ranks):
            return []  # a worker was dropped meanwhile, so another comparison follows
        audit.alike = tuple(alike)
        verdict = shard_assignment.verdict(audit.copies, alike)
        if verdict is not None and not audit.is_one_word():
            return self._conclude(shard, verdict, now)
        audit.disputed.update(ranks)
        rank = audit.another(self._witnesses(audit), step + shard)
        if rank is not None:
            return self._ask(rank, shard, now)
        reason = (
            f"workers {sorted(audit.disputed)} disagree on shard {shard} of step {step}, and it "
            "can't be decided which is wrong: training halted before any update"
        )
        return [self._end_audit(shard), *self._halt(do.Stop(step, None, reason, shard=shard))]

    def refused(self, step: int, reason: str) -> list[Effect]:
        """Return the effects that halt the run before `step`, because its average is not finite."""
        return self._halt(do.Stop(step, None, reason))

    def saved(self, now: float) -> list[Effect]:
        """Return the effects of a completed Save: the run goes on, or ends."""
        assert self._saving
        self._saving = False
        if self._finish is not None:
            return [self._finish]
        self._gathering_since = now
        return self._settle(now)

    def tick(self, now: float) -> list[Effect]:
        """Return the heartbeats that are due; drop silent peers, end a run that waits too long."""
        effects: list[Effect] = []
        for peer, why in self._overdue(now):
            if peer in self.peers:  # the run may end when the first peer is dropped
                effects += self._drop(peer, why, now)
        effects += self._beat(now)
        waited = now - self._gathering_since
        waits = self.stage is Stage.GATHERING and not self._saving
        if waits and waited >= self.timing.gather_s and not self._loads():
            effects += self._give_up(waited)
        return effects

    def _give_up(self, waited: float) -> list[Effect]:
        there = sorted(member.in_rank() for member in self._members().values())
        reason = f"step {self.step} has waited {waited:.0f} s for workers; present are {there}"
        return self._end(do.Finish("failed", reason), say.Shutdown(problem=say.brief(reason)))

    def _loads(self) -> bool:
        """Return whether a worker that was welcomed within `gather_s` is still loading."""
        until = self._gathering_since + self.timing.gather_s
        return any(
            one.phase is Phase.LOADING and one.welcomed < until for one in self.peers.values()
        )

    def stop(self, reason: str, now: float, *, at_once: bool = False) -> list[Effect]:
        """Return the effects that give the workers the reason and end the run with a checkpoint.

        The current step is finished first, or abandoned if `at_once`.
        """
        if self.stage is Stage.OVER:
            return []
        self._stopping = reason
        return self._stopped(self.step + self._made, reason) if at_once else self._settle(now)

    # --- joining ----------------------------------------------------------------------------------

    def _hello(self, peer: Peer, member: Member, hello: say.Hello, now: float) -> list[Effect]:
        effects = self._admit(peer, member, hello)
        return [*effects, *self._settle(now)]

    def _want(self, peer: Peer, member: Member, want: say.Want, now: float) -> list[Effect]:
        """Return the effect that serves a piece of a file. The run waits for workers that fetch."""
        assert self.run.package is not None, "nobody fetches without one"
        num_bytes = self.run.package.sizes.get(want.file, 0)
        if want.offset >= num_bytes:
            raise ProtocolError(f"Want file={want.file} offset={want.offset}: no such piece")
        self._gathering_since = now
        return [do.Serve(peer, say.Piece(file=want.file, offset=want.offset))]

    def unreadable(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Return the refusal of a requested file that can't be read."""
        if peer not in self.peers:
            return []
        told = say.Refuse(reason=say.brief(reason), retry=False)
        return [do.Send(peer, told), *self._drop(peer, reason, now)]

    def _loaded(self, peer: Peer, member: Member, loaded: say.Loaded, now: float) -> list[Effect]:
        self._require_step(loaded.step)
        member.phase = Phase.READY
        rank = member.in_rank()
        kept = [do.Joined(rank, self.step, late=self._begun), do.Keep(rank, loaded)]
        return [*kept, *self._settle(now)]

    # --- a step -----------------------------------------------------------------------------------

    def _conclude(self, shard: int, verdict: shard_assignment.Verdict, now: float) -> list[Effect]:
        """End an audit; drop the worker that it caught, and void what it delivered in the step."""
        effects = self._count_copy(shard, verdict)
        if verdict.culprit is not None:
            self._convicted[verdict.culprit] += 1
            reason = f"caught: shard {shard} of step {self.step} is not what others compute"
            effects += self._drop(self._ranks()[verdict.culprit], reason, now)
        return [*effects, *self._release()]

    def _non_finite(
        self, peer: Peer, member: Member, said: say.NonFinite, now: float
    ) -> list[Effect]:
        self._require_step(said.step)
        rank, reason = member.in_rank(), member.why_it_halts(said)
        return [do.Keep(rank, said), *self._halt(do.Stop(said.step, rank, reason, said))]

    def _staged(self, peer: Peer, member: Member, said: say.Staged, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.STAGED
        return self._settle(now)

    def _applied(self, peer: Peer, member: Member, said: say.Applied, now: float) -> list[Effect]:
        self._require_step(said.step)
        member.phase = Phase.READY
        first = [] if self._made else [do.Apply(self.step)]
        self._made = True
        return [*first, do.Keep(member.in_rank(), said), *self._settle(now)]

    def _leave(self, peer: Peer, member: Member, said: say.Leave, now: float) -> list[Effect]:
        return self._drop(peer, f"left: {said.reason}", now)

    _turns: ClassVar[Mapping[type[say.Message], Callable[..., list[Effect]]]] = {
        say.Hello: _hello,
        say.Want: _want,
        say.Loaded: _loaded,
        say.Computed: Dealing._computed,
        say.TreeNode: Dealing._node,
        say.NonFinite: _non_finite,
        say.Staged: _staged,
        say.Applied: _applied,
        say.Leave: _leave,
        say.Heartbeat: lambda *_: [],
    }

    # --- the next move of the run -----------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while (turn := self._next(now)) is not None:
            effects += turn
        return effects

    def _next(self, now: float) -> list[Effect] | None:
        """Return the effects of the run's next move; None if it has to wait."""
        if self.stage is Stage.OVER:
            return None
        if self.stage is Stage.GATHERING:
            return self._begin(now)
        if next(self._phases(), None) is None:
            # All workers are lost. A step that one of them made counts; else it is computed again.
            return self._gather(self.step + self._made, now)
        if self._is_staged() and all(phase is Phase.STAGED for phase in self._phases()):
            return self._commit()
        if self.stage is Stage.APPLYING and Phase.APPLYING not in self._phases():
            return self._gather(self.step + 1, now)
        return None

    def _is_staged(self) -> bool:
        return self.stage is Stage.STAGING

    def _commit(self) -> list[Effect]:
        self.stage = Stage.APPLYING
        return self._tell(say.Commit(step=self.step), Phase.APPLYING)

    def _gather(self, step: int, now: float) -> list[Effect]:
        if step > self.step:
            self._thrown_out.clear()
        self.step, self.stage = step, Stage.GATHERING
        self._gathering_since, self._made = now, False
        self._reducing.clear()
        self._audits.clear()
        return [do.Gather(step)]

    def _begin(self, now: float) -> list[Effect] | None:
        """Save, end, admit workers or hand out the step, whichever is next; return None to wait."""
        if self._saving:
            return None
        over = self.step == self.run.num_steps
        waiting = {} if over else self._peers_in(Phase.WAITING)
        due = self.step in self.run.saves and self.step != self._saved
        stops = self._stopping is not None and not over
        if (waiting or due or stops) and not self._has_state(self.step):
            return self._fetch(now)
        if due:
            self._saved, self._saving = self.step, True
            return [do.Save(self.step)]
        if over:
            return self._end(do.Finish("completed"), say.Shutdown(problem=None))
        if self._stopping is not None:
            return self._stopped(self.step, self._stopping)
        for member in waiting.values():
            member.phase, member.welcomed = Phase.LOADING, now
        if waiting:
            return [do.Send(peer, self._welcome(member)) for peer, member in waiting.items()]
        return self._hand_out(self._members(), now) if self._is_complete() else None

    def _is_complete(self) -> bool:
        there = {member.rank for member in self._members().values()}
        awaited = set(self.run.awaited.get(self.step, ())) - self._barred()
        enough = len(there) >= (1 if self._begun else self.run.num_awaited)
        return enough and there.issuperset(awaited) and not self._peers_in(Phase.LOADING)

    def _has_state(self, step: int) -> bool:
        return True

    def _fetch(self, now: float) -> list[Effect] | None:
        """Request the state from a worker of a mesh; return None while it is on its way."""
        raise AssertionError("the coordinator of a star has the state")

    def _hand_out(self, members: Mapping[Peer, Member], now: float) -> list[Effect]:
        self._begun, self.stage = True, Stage.COMPUTING
        return self._deal(members, now)

    def _throw_out(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Close the connection of a peer that broke the protocol; tell a welcomed worker why.

        If the same rank is thrown out repeatedly for the same reason, with no step made in between,
        end the run: the worker would return again and again.
        """
        member = self.peers[peer]
        if member.phase in (Phase.CHALLENGED, Phase.FETCHING, Phase.WAITING, Phase.ASKED):
            return self._drop(peer, reason, now)
        rank, times = member.in_rank(), self._thrown_out.count(member.in_rank(), reason)
        if times >= THROWN_OUT_MAX:
            why = problem(rank, self.step, times, reason)
            return self._end(do.Finish("failed", why), say.Shutdown(problem=say.brief(why)))
        told = say.Refuse(reason=say.brief(f"disconnected: {reason}"), retry=True)
        return [do.Send(peer, told), *self._drop(peer, reason, now)]

    def _drop(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Close the connection to `peer`, and go on without that worker."""
        member = self.peers.pop(peer)
        effects: list[Effect] = [do.Close(peer, reason)]
        if member.phase in MEMBERS and self.stage is not Stage.OVER:
            effects.append(do.Left(member.in_rank(), self.step, reason))
            self._pace.forget(member.in_rank())
            members = self._members()
            if members:
                effects += self._replace(member, members, now)
        return [*effects, *self._settle(now)]

    def _halt(self, stop: do.Stop) -> list[Effect]:
        halt = say.Halt(step=stop.step, reason=say.brief(stop.reason))
        return [stop, *self._end(do.Finish("halted", stop.reason), halt)]

    def _stopped(self, step: int, reason: str) -> list[Effect]:
        finish = do.Finish("stopped", reason)
        *farewells, _ = self._end(finish, say.Shutdown(problem=say.brief(reason)))
        if self._saving:  # the same state: a stop at once finds the run between two steps
            saves: list[Effect] = []
        elif self._has_state(step):
            saves, self._saving = [do.Save(step)], True
        else:
            return [*farewells, finish]
        self._finish = finish
        return [*farewells, *saves]

    def _end(self, finish: do.Finish, farewell: say.Message) -> list[Effect]:
        self.stage = Stage.OVER
        return [*self._dismiss(farewell, finish.reason or finish.status), finish]

    # --- helpers ----------------------------------------------------------------------------------

    def _welcome(self, member: Member) -> say.Welcome:
        resumed = self.run.resumed and not self._begun
        rank, proof = member.in_rank(), member.proof
        return say.Welcome(
            rank=rank, step=self.step, blocks=self.run.num_blocks, resumed=resumed, proof=proof
        )
