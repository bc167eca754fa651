"""A worker of a layer pipeline: passes shards through its stage, forward and backward.

Hidden states come from the stage before, and their gradients from the one after it, straight from
worker to worker. The sum of this worker's gradients goes to the coordinator, which makes the step
and sends back the stage's new weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import pipeline
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.phases import PIPELINE_WORKER_MAY_HEAR
from entrenar_py.train.wire.phases import WorkerPhase as Phase
from entrenar_py.train.wire.pipeline import Places
from entrenar_py.train.wire.terms import Terms, Timing

ROUNDS_MAX = 32  # that may begin while a worker hears nothing of the coordinator


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a pass.

    `dtype` is the format of hidden states that go on to the next stage, which draws random numbers
    from number `draws` on. `nodes` are those of all blocks, after the last pass of the step. The
    pass began and ended at these seconds of the driver's clock.
    """

    dtype: str = ""
    draws: int = 0
    nodes: Sequence[say.TreeNode] = ()
    began_s: float = 0.0
    ended_s: float = 0.0


class PipelineWorker(MeshWorker):
    """The state machine of a worker at one of `places`; `stage` is known once it is welcomed."""

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
        self._place = rank  # the one it was started for, None for any
        self._refused_since: float | None = None  # when its last place was first refused
        self._loading: do.Load | None = None
        self._passes: list[tuple[int, bool]] = []  # that are left: a shard, and whether forward
        self._shards: tuple[int, ...] = ()
        self._arrived: set[tuple[int, bool]] = set()  # the passes of which the input is here
        self._running: do.Pass | None = None
        self._assigned_s = 0.0  # when the step's shards were assigned
        self._times: list[pipeline.Timed] = []  # of the step's passes so far

    # --- joining ----------------------------------------------------------------------------------

    def _enter(self, welcome: say.Welcome) -> list[Effect]:
        """Load the stage in the background; `loaded` is called at the end."""
        if self._loading is not None:
            raise ProtocolError("Welcome: it came before, and is being loaded")
        load, *_ = super()._enter(welcome)
        assert isinstance(load, do.Load), "what a worker is welcomed for"
        if welcome.rank >= self.places.num_ranks:
            raise ProtocolError(f"Welcome rank={welcome.rank}: there are {self.places.num_ranks}")
        self.stage, self.phase = self.places.stage_of(welcome.rank), Phase.GREETED
        self._loading, self._refused_since = load, None
        return [load]

    def _refused(self, refuse: say.Refuse) -> list[Effect]:
        """Ask for any place again if another worker keeps the last one.

        Not at once: the coordinator may still count this worker's own last connection, and two
        places of one worker would have one address.
        """
        if self.phase is Phase.GREETED:
            since = self._heard if self._refused_since is None else self._refused_since
            self._refused_since = since
            if self._heard - since > self.timing.dead_after_s:
                self.rank = self._place
        return super()._refused(refuse)

    def loaded(self, asked: do.Load) -> list[Effect]:
        """Take part from now on: the stage and its state are here."""
        if asked is not self._loading:
            return []  # for a connection that has ended
        self._loading, self.phase = None, Phase.READY
        return [do.Send(self._peer, say.Loaded(step=asked.step))]

    # --- passes -----------------------------------------------------------------------------------

    def passed(self, asked: do.Pass, outcome: Passed | say.NonFinite) -> list[Effect]:
        """Take the result of `asked`, unless its round or its connection has ended."""
        if asked != self._running:
            return []
        self._running = None
        if isinstance(outcome, say.NonFinite):
            self._passes.clear()
            return [do.Send(self._peer, outcome)]
        self._note_time(asked, outcome)
        sends = self._forward(asked, outcome)
        if self._passes:
            return [*self._go_on(), *sends]  # they are encoded during the next pass
        self.phase = Phase.READY
        assert self._group is not None, "passes belong to a round"
        number = self._group.round
        summed = say.Summed(
            step=asked.step,
            round=number,
            shards=self._shards,
            times_us=pipeline.encode(self._times),
        )
        nodes = [replace(node, round=number) for node in outcome.nodes]
        return [*sends, do.Send(self._peer, summed), *(do.Send(self._peer, n) for n in nodes)]

    def wants(self, asked: do.Compute | do.Pass | do.Load) -> bool:
        """Return whether `asked` is still to be done; after its round or connection it is not."""
        return asked is self._loading or asked == self._running

    def _note_time(self, asked: do.Pass, outcome: Passed) -> None:
        if 3 * len(self._times) + 3 <= say.LIST_MAX:
            began, ended = (
                max(0, round(1e6 * (at - self._assigned_s)))
                for at in (outcome.began_s, outcome.ended_s)
            )
            self._times.append(pipeline.Timed(asked.shard, asked.is_forward, began, ended))

    def _forward(self, asked: do.Pass, outcome: Passed) -> list[Effect]:
        """Send what a pass made to the worker that needs it."""
        assert self._group is not None, "passes belong to a round"
        is_last = self.stage == self.places.num_stages - 1
        about = {"step": asked.step, "round": self._group.round, "shard": asked.shard}
        if asked.is_forward and not is_last:
            hidden = say.Activation(**about, dtype=outcome.dtype, draws=outcome.draws)
            return self.links.say(self._holder(self.stage + 1, asked.shard), hidden)
        if self.stage == 0:
            return []
        gradient = say.ActivationGradient(**about)
        return self.links.say(self._holder(self.stage - 1, asked.shard), gradient)

    def _go_on(self) -> list[Effect]:
        """Begin the next pass, if its input is here and no other one is running."""
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
            raise ProtocolError(f"Assign shards={assign.shards}: no round, or one is in work")
        if any(self._holder(self.stage, shard) != self.rank for shard in assign.shards):
            raise ProtocolError(f"Assign shards={assign.shards}: others hold them in this round")
        self._shards, self._assigned_s = assign.shards, self._heard
        self._passes = pipeline.order(
            assign.shards, stage=self.stage, num_stages=self.places.num_stages
        )
        self.phase = Phase.COMPUTING
        return self._go_on()

    def _start_round(self) -> list[Effect]:
        """Begin a round, or the next step in the same round."""
        self.phase = Phase.READY
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
            raise ProtocolError(f"{name} shard={shard}: not due here, or it came before")
        self._arrived.add(key)
        return [do.Receive(message), *self._go_on()]

    def _postpone(self, peer: Peer) -> list[Effect]:
        self._num_postponed += 1
        most = 2 * len(self._holders)
        if self._group is None:  # a stage sends that much before it needs an answer, in each round
            most = ROUNDS_MAX * (self.places.num_stages + 1) * self.places.num_ranks
        if self._num_postponed > most:
            raise ProtocolError("more early messages than a round can have")
        return [do.Postpone(peer)]

    def _holder(self, stage: int, shard: int) -> int:
        """Return the rank that computes `shard` in `stage`."""
        num_shards = len(self._holders) // self.places.num_stages
        if not 0 <= shard < num_shards:
            raise ProtocolError(f"shard={shard}: there are {num_shards}")
        return self._holders[stage * num_shards + shard]

    def _hold(self, message: say.Average | say.Weights) -> list[Effect]:
        self._require_step(message.step)
        own, block = self.places.blocks[self.stage], message.block
        if block in self._held or block not in own:
            raise ProtocolError(f"Weights block={block}: it came before, or is another stage's")
        if self._group is None:
            raise ProtocolError(f"Weights block={block}: no round has begun")
        self._held.add(block)
        if len(self._held) < len(own):
            return [do.Hold(self.step, block)]
        self.phase = Phase.STAGED
        staged = say.Staged(step=self.step, round=self._group.round)
        return [do.Hold(self.step, block), do.Send(self._peer, staged)]

    # --- the end of a connection ------------------------------------------------------------------

    def _drop(self, reason: str) -> list[Effect]:
        self._clear()
        return super()._drop(reason)

    def _end(self, finish: do.Finish) -> list[Effect]:
        self._clear()
        return super()._end(finish)
