"""The peers of a layer pipeline: each worker has a stage of the model, the coordinator none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import pipeline, terms
from entrenar_py.train.wire.attendance import Member
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.mesh_coordinator import Grouping
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import (
    PIPELINE_PEER_MAY_SAY,
    PIPELINE_WORKER_MAY_HEAR,
    PeerPhase,
    Stage,
    WorkerPhase,
)
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.terms import Run, Terms, Timing

# The coordinator of a layer pipeline: each worker has a stage of the model.
#
# The coordinator holds the state, applies the steps, and sends each stage its new weights, as in a
# star with updates by the server. Shards pass through all stages, from worker to worker. If a
# worker is lost or a link breaks before a step is committed, the step did not happen: as soon as
# every stage has a worker again, a new round computes all shards of the step again, with the same
# bits.


class PipelineCoordinator(Grouping):
    """The coordinator's state machine. Times are seconds on a monotonic clock."""

    may_say = PIPELINE_PEER_MAY_SAY

    def __init__(self, run: Run, *, secret: bytes, timing: Timing, now: float) -> None:
        super().__init__(run, secret=secret, timing=timing, now=now)
        assert run.places is not None, "a pipeline has places"
        assert run.server_updates, "its steps are made here"
        self.places: Places = run.places
        self._is_void = False  # whether the step has to restart
        self._unsuited: set[int] = set()  # ranks that the worker being admitted can't have

    # --- joining ----------------------------------------------------------------------------------

    def _admit(self, peer: Peer, member: Member, hello: say.Hello) -> list[Effect]:
        unsuited = self.places.unsuited(hello.backend)
        reason = self._mismatch(hello, unsuited)
        if hello.rank is None:
            unsuited = unsuited | self._named()
        ours, secret = self.run.terms, self.secret
        # The secret is checked first: a peer without it doesn't learn the plan of the stages.
        if reason and terms.refusal(hello, member.challenge, ours, secret=secret) is None:
            del self.peers[peer]
            refuse = say.Refuse(reason=reason, retry=False)
            return [do.Send(peer, refuse), do.Close(peer, f"refused: {reason}")]
        self._unsuited = unsuited
        effects = super()._admit(peer, member, hello)
        self._unsuited = set()
        return [self._with_name(effect, hello) for effect in effects]

    def _with_name(self, effect: Effect, hello: say.Hello) -> Effect:
        """Return `effect`; if it refuses a place, add the name that the place is reserved for."""
        match effect:
            case do.Send(message=say.Refuse(retry=True) as refuse) if hello.rank is not None:
                name = self.places.called(hello.rank)
                if name:
                    told = f"--id {name}: a live worker has that name; end it, or use another one"
                    return replace(effect, message=replace(refuse, reason=told))
        return effect

    def _mismatch(self, hello: say.Hello, unsuited: set[int]) -> str:
        """Return why no stage open to the worker runs on its backend; "" if one does."""
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
            return (
                f"the stages are planned for workers by name: start it with --id and one of {names}"
            )
        return ""

    def _named(self) -> set[int]:
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
        if member.phase is not PeerPhase.STAGING:
            raise ProtocolError("Staged: not all its weights were sent")
        return super()._staged(peer, member, said, now)

    def _non_finite(
        self, peer: Peer, member: Member, said: say.NonFinite, now: float
    ) -> list[Effect]:
        if not any(said.shard in shards for shards in member.assigned):
            # from a round that has ended: its step is computed again, and this is reported again
            return []
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
        self._forget_complaints()  # it may have caused the complaints
        self._start_over()
        return []

    def _start_over(self) -> None:
        """End the round, and restart its step unless the step is committed.

        No other round gets the same number, so messages still on their way have no effect, even
        while the run waits for a worker.
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
            member.phase = PeerPhase.STAGING
        return sends + self._settle(now)

    def _blocks_of(self, member: Member) -> range:
        return self.places.blocks[self.places.stage_of(member.in_rank())]


# A worker of a layer pipeline: passes shards through its stage, forward and backward.
#
# Hidden states come directly from a worker of the previous stage, and their gradients from a worker
# of the next stage. The sum of this worker's gradients goes to the coordinator, which applies the
# step and sends back the stage's new weights.

ROUNDS_MAX = 32  # that may begin while a worker receives nothing from the coordinator


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a pass.

    `dtype` is the dtype of the hidden states for the next stage, which draws random numbers from
    number `draws` on. `nodes` has the nodes of all blocks, after the last pass of the step.
    `began_s` and `ended_s` are times of the driver's clock, in seconds.
    """

    dtype: str = ""
    draws: int = 0
    nodes: Sequence[say.TreeNode] = ()
    began_s: float = 0.0
    ended_s: float = 0.0


class PipelineWorker(MeshWorker):
    """The state machine of a worker at one of `places`; `stage` is known after the Welcome."""

    may_hear = PIPELINE_WORKER_MAY_HEAR
    parts = (say.Activation, say.ActivationGradient)

    def __init__(
        self,
        terms: Terms,
        *,
        places: Places,
        secret: bytes,
        backend: str,
        rank: int | None = None,
        port: int | None = None,
        timing: Timing,
    ) -> None:
        super().__init__(terms, secret=secret, backend=backend, rank=rank, port=port, timing=timing)
        self.places, self.stage = places, -1
        self.links.num_ranks = places.num_ranks
        self._place = rank  # the rank that it was started for, None for any
        self._refused_since: float | None = None  # when its last place was first refused
        self._loading: do.Load | None = None
        # the remaining passes: a shard, and whether forward
        self._passes: list[tuple[int, bool]] = []
        self._shards: tuple[int, ...] = ()
        self._arrived: set[tuple[int, bool]] = set()  # the passes that have their input
        self._running: do.Pass | None = None
        self._assigned_s = 0.0  # when the step's shards were assigned
        self._times: list[pipeline.Timed] = []  # times of the step's passes so far

    # --- joining ----------------------------------------------------------------------------------

    def _enter(self, welcome: say.Welcome) -> list[Effect]:
        """Load the stage in the background; `loaded` is called at the end."""
        if self._loading is not None:
            raise ProtocolError("Welcome: it was already received, and is being loaded")
        load, *_ = super()._enter(welcome)
        assert isinstance(load, do.Load), "what a worker is welcomed for"
        if welcome.rank >= self.places.num_ranks:
            raise ProtocolError(f"Welcome rank={welcome.rank}: there are {self.places.num_ranks}")
        self.stage, self.phase = self.places.stage_of(welcome.rank), WorkerPhase.GREETED
        self._loading, self._refused_since = load, None
        return [load]

    def _refused(self, refuse: say.Refuse) -> list[Effect]:
        """Ask for any place again if the previous place is taken by another worker.

        This doesn't happen at once: the coordinator may still count this worker's own last
        connection, and two places of one worker would have the same address.
        """
        if self.phase is WorkerPhase.GREETED:
            since = self._heard if self._refused_since is None else self._refused_since
            self._refused_since = since
            if self._heard - since > self.timing.dead_after_s:
                self.rank = self._place
        return super()._refused(refuse)

    def loaded(self, load: do.Load) -> list[Effect]:
        """Return the effects of the loaded stage and state: the worker takes part from now on."""
        if load is not self._loading:
            return []  # for a connection that has ended
        self._loading, self.phase = None, WorkerPhase.READY
        return [do.Send(self._peer, say.Loaded(step=load.step))]

    # --- passes -----------------------------------------------------------------------------------

    def passed(self, effect: do.Pass, outcome: Passed | say.NonFinite) -> list[Effect]:
        """Return the effects of the outcome of the pass `effect`.

        There are none if the round or the connection of the pass has ended.
        """
        if effect != self._running:
            return []
        self._running = None
        if isinstance(outcome, say.NonFinite):
            self._passes.clear()
            return [do.Send(self._peer, outcome)]
        self._note_time(effect, outcome)
        sends = self._forward(effect, outcome)
        if self._passes:
            return [*self._go_on(), *sends]  # the tensors are encoded during the next pass
        self.phase = WorkerPhase.READY
        assert self._group is not None, "passes belong to a round"
        number = self._group.round
        summed = say.Summed(
            step=effect.step,
            round=number,
            shards=self._shards,
            times_us=pipeline.encode(self._times),
        )
        nodes = [replace(node, round=number) for node in outcome.nodes]
        return [*sends, do.Send(self._peer, summed), *(do.Send(self._peer, n) for n in nodes)]

    def wants(self, asked: do.Compute | do.Pass | do.Load) -> bool:
        """Return whether `asked` is still needed: its round and connection have not ended."""
        return asked is self._loading or asked == self._running

    def _note_time(self, effect: do.Pass, outcome: Passed) -> None:
        if 3 * len(self._times) + 3 <= say.LIST_MAX:
            began, ended = (
                max(0, round(1e6 * (at - self._assigned_s)))
                for at in (outcome.began_s, outcome.ended_s)
            )
            self._times.append(pipeline.Timed(effect.shard, effect.is_forward, began, ended))

    def _forward(self, effect: do.Pass, outcome: Passed) -> list[Effect]:
        """Send the result of a pass to the worker that needs it."""
        assert self._group is not None, "passes belong to a round"
        is_last = self.stage == self.places.num_stages - 1
        about = {"step": effect.step, "round": self._group.round, "shard": effect.shard}
        if effect.is_forward and not is_last:
            hidden = say.Activation(**about, dtype=outcome.dtype, draws=outcome.draws)
            return self.links.say(self._holder(self.stage + 1, effect.shard), hidden)
        if self.stage == 0:
            return []
        gradient = say.ActivationGradient(**about)
        return self.links.say(self._holder(self.stage - 1, effect.shard), gradient)

    def _go_on(self) -> list[Effect]:
        """Begin the next pass if its input is here and no other pass is running."""
        if self._running is not None or not self._passes:
            return []
        shard, is_forward = self._passes[0]
        if not (is_forward and self.stage == 0) and self._passes[0] not in self._arrived:
            return []
        del self._passes[0]
        self._running = do.Pass(next(self._tickets), self.step, shard, is_forward, not self._passes)
        return [self._running]

    # --- a round ----------------------------------------------------------------------------------

    def _turn(self, message: say.Message) -> list[Effect]:
        if isinstance(message, say.Group):
            num_stages, num_holders = self.places.num_stages, len(message.holders)
            if num_holders % num_stages or not set(message.holders).issubset(message.ranks):
                raise ProtocolError(
                    f"Group with {num_holders} holders: use one of its ranks for each shard and "
                    f"each of {num_stages} stages"
                )
        return super()._turn(message)

    def _take(self, assign: say.Assign) -> list[Effect]:
        self._require_step(assign.step)
        if self._group is None or self._passes or self._running is not None:
            raise ProtocolError(
                f"Assign shards={assign.shards}: no round was begun, or one is in progress"
            )
        if any(self._holder(self.stage, shard) != self.rank for shard in assign.shards):
            raise ProtocolError(
                f"Assign shards={assign.shards}: other workers hold them in this round"
            )
        self._shards, self._assigned_s = assign.shards, self._heard
        self._passes = pipeline.order(
            assign.shards, stage=self.stage, num_stages=self.places.num_stages
        )
        self.phase = WorkerPhase.COMPUTING
        return self._go_on()

    def _start_round(self) -> list[Effect]:
        self.phase = WorkerPhase.READY
        self._clear()
        group = self._group
        assert group is not None, "only a group has rounds"
        self._num_postponed = 0
        return [do.Regroup(group.round), do.Again()]

    def _clear(self) -> None:
        self._passes, self._shards, self._running, self._loading = [], (), None, None
        self._arrived.clear()
        self._times.clear()
        self._held.clear()

    def _exchanged(self, peer: Peer, rank: int, message: say.Message) -> list[Effect]:
        if not isinstance(message, say.Activation | say.ActivationGradient):
            raise ProtocolError(f"{type(message).__name__} from another worker")
        group, name = self._group, type(message).__name__
        if group is None or message.round > group.round or message.step > self.step:
            return self._postpone(peer)
        if message.round < group.round:
            return []  # was on its way when the round ended
        self._require_step(message.step)
        is_forward = isinstance(message, say.Activation)
        sender = self.stage - 1 if is_forward else self.stage + 1
        shard, key = message.shard, (message.shard, is_forward)
        num_shards = len(self._holders) // self.places.num_stages
        is_possible = 0 <= sender < self.places.num_stages and shard < num_shards
        if not is_possible or self._holder(sender, shard) != rank:
            raise ProtocolError(f"{name} shard={shard}: not due from rank {rank}")
        if self._holder(self.stage, shard) != self.rank or key in self._arrived:
            raise ProtocolError(f"{name} shard={shard}: not due here, or already received")
        self._arrived.add(key)
        return [do.Receive(message), *self._go_on()]

    def _postpone(self, peer: Peer) -> list[Effect]:
        self._num_postponed += 1
        most = 2 * len(self._holders)
        # a stage sends at most this many messages in a round before it needs an answer
        if self._group is None:
            most = ROUNDS_MAX * (self.places.num_stages + 1) * self.places.num_ranks
        if self._num_postponed > most:
            raise ProtocolError("more early messages than a round can have")
        return [do.Postpone(peer)]

    def _holder(self, stage: int, shard: int) -> int:
        num_shards = len(self._holders) // self.places.num_stages
        if not 0 <= shard < num_shards:
            raise ProtocolError(f"shard={shard}: there are {num_shards}")
        return self._holders[stage * num_shards + shard]

    def _hold(self, message: say.Average | say.Weights) -> list[Effect]:
        self._require_step(message.step)
        own, block = self.places.blocks[self.stage], message.block
        if block in self._held or block not in own:
            raise ProtocolError(
                f"Weights block={block}: it was already received, or belongs to another stage"
            )
        if self._group is None:
            raise ProtocolError(f"Weights block={block}: no round has begun")
        self._held.add(block)
        if len(self._held) < len(own):
            return [do.Hold(self.step, block)]
        self.phase = WorkerPhase.STAGED
        staged = say.Staged(step=self.step, round=self._group.round)
        return [do.Hold(self.step, block), do.Send(self._peer, staged)]

    # --- the end of a connection ------------------------------------------------------------------

    def _drop(self, reason: str) -> list[Effect]:
        self._clear()
        return super()._drop(reason)

    def _end(self, finish: do.Finish) -> list[Effect]:
        self._clear()
        return super()._end(finish)
