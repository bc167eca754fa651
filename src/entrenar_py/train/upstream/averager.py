"""The averaging coordinator: admits workers, assigns shards, and requests averages.

It is a state machine: its methods take events (a connection, a message, a tick of the clock, a
completed average) and return effects. Each shard of a step is assigned to one worker at a time, and
a worker has one shard at a time, because neither GradientPayload nor BlockGradient names its shard.
A part of the gradient is averaged as soon as it has arrived for every shard, over the shards in
order, and then sent to all workers. A step ends when all parts are averaged.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from enum import StrEnum

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.upstream import frames as say
from entrenar_py.train.upstream import terms as wire
from entrenar_py.train.upstream.frames import (
    UPLOADS,
    WHOLE,
    BlockGradient,
    GradientPayload,
    Heartbeat,
    JoinRequest,
    Part,
    Upload,
    WireMessage,
    part_of,
)
from entrenar_py.train.upstream.terms import (
    BLOCKS_MAX,
    AveragingRun,
    Extent,
    Patience,
    lacking,
    parts_of,
)
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer

IGNORED_MAX = 64  # repeated or late messages before a worker is expelled


class WirePhase(StrEnum):
    """The phase of one connection."""

    CONNECTED = "connected"  # must send a JoinRequest
    IDLE = "idle"  # has no shard; late messages of earlier steps are ignored
    COMPUTING = "computing"  # has a shard to deliver


MAY_SEND: dict[WirePhase, tuple[type[WireMessage], ...]] = {
    WirePhase.CONNECTED: (JoinRequest,),
    WirePhase.IDLE: (Heartbeat, *UPLOADS),
    WirePhase.COMPUTING: (Heartbeat, *UPLOADS),
}


@dataclass(slots=True)
class AveragingWorker:
    """One connection. Times are seconds on a monotonic clock."""

    host: str
    heard: float  # when the last byte arrived
    worker_id: int | None = None
    node_id: str = ""
    beats: bool = False  # whether it ever sent a heartbeat
    shard: int | None = None
    since: float = 0.0  # when the shard was assigned
    extents: dict[Part, Extent] = field(default_factory=dict)  # parts of the shard that arrived
    num_blocks: int = 0  # as given with a block of the shard
    num_done: int = 0  # shards of this step that the worker delivered
    takes_part: bool = False  # whether the worker gets the averages of this step
    told: set[Part] = field(default_factory=set)  # the averages of this step that were sent to it
    num_ignored: int = 0

    @property
    def phase(self) -> WirePhase:
        """The phase that the connection is in."""
        if self.worker_id is None:
            return WirePhase.CONNECTED
        return WirePhase.IDLE if self.shard is None else WirePhase.COMPUTING

    def name(self) -> str:
        """Return the worker's name for messages."""
        return f"worker {self.worker_id} ({self.node_id!r})"

    def begin_step(self) -> None:
        """Note that a step begins in which the worker takes part."""
        self.num_done, self.takes_part = 0, True
        self.told.clear()

    def assign(self, shard: int, now: float) -> None:
        """Note that the worker has to deliver `shard`."""
        self.shard, self.since, self.heard = shard, now, now
        self.takes_part, self.num_blocks = True, 0
        self.extents.clear()

    def end_shard(self) -> None:
        """Note that the shard is delivered."""
        self.shard = None
        self.num_done += 1

    # --- its messages -----------------------------------------------------------------------------

    def require_legal(self, message: WireMessage) -> None:
        """Raise ProtocolError if the worker may not send this type of message now."""
        if not isinstance(message, MAY_SEND[self.phase]):
            kind = type(message).__name__
            raise ProtocolError(f"{kind} from a connection that is {self.phase}")
        if isinstance(message, UPLOADS) and message.worker_id != self.worker_id:
            raise ProtocolError(f"worker_id={message.worker_id}: it was accepted as {self.name()}")

    def is_due(self, upload: Upload, step: int) -> bool:
        """Return whether `upload` is for the worker's shard of `step`; False if repeated or late.

        Raises ProtocolError if it was never requested, or if the worker repeats too many.
        """
        what = f"{type(upload).__name__} of step {upload.step}"
        if upload.step > step:
            raise ProtocolError(f"{what}: the run is at step {step}")
        if upload.step == step:
            if self.shard is not None and part_of(upload) not in self.extents:
                return True
            if self.shard is None and not self.num_done:
                raise ProtocolError(f"{what}: no shard of it was assigned to this worker")
        if self.num_ignored >= IGNORED_MAX:
            raise ProtocolError(f"{what}: this is the {IGNORED_MAX + 1}th repeated or late message")
        return False

    def require_possible(self, upload: Upload, run: AveragingRun) -> None:
        """Raise ProtocolError if `upload` is not of this run or too large for a shard."""
        part = part_of(upload)
        if isinstance(upload, BlockGradient):
            if not 0 < upload.num_blocks <= BLOCKS_MAX or upload.block >= upload.num_blocks:
                raise ProtocolError(
                    f"block={upload.block} of num_blocks={upload.num_blocks}: use a block below "
                    f"num_blocks, and at most {BLOCKS_MAX} of them"
                )
        elif run.components is not None:
            if isinstance(upload, GradientPayload):
                raise ProtocolError(
                    "GradientPayload: with `components` in the configuration a shard has only "
                    "blocks and components"
                )
            if upload.component not in run.components:
                raise ProtocolError(f"component={part.number}: use one of {run.components}")
        size = 4 * sum(extent.num_gradients for extent in self.extents.values())
        if size + 4 * upload.gradients > run.gradient_bytes_max:
            raise ProtocolError(
                f"{part}: with it the shard's gradient has {size + 4 * upload.gradients} bytes; "
                f"gradient_bytes_max is {run.gradient_bytes_max}"
            )

    def take(self, upload: Upload) -> None:
        """Note that a part of the shard arrived."""
        self.extents[part_of(upload)] = Extent.of(upload)
        if isinstance(upload, BlockGradient):
            self.num_blocks = upload.num_blocks


class WireStage(StrEnum):
    """The stage of a run."""

    GATHERING = "gathering"  # waits for enough workers
    AVERAGING = "averaging"  # in a step
    OVER = "over"


class Averager:
    """The averaging coordinator's state machine. Times are seconds on a monotonic clock."""

    def __init__(self, run: AveragingRun, *, patience: Patience, now: float) -> None:
        self.run, self.patience = run, patience
        self.stage, self.step = WireStage.GATHERING, 0
        self.peers: dict[Peer, AveragingWorker] = {}
        # parts of a gradient, known when a shard is complete
        self.layout: dict[Part, Extent] | None = None
        self._known: dict[Part, Extent] = {}  # the parts that arrived, complete or not
        self._num_blocks = 0  # as given by the first block
        self._shards: list[range] = []  # of this step
        self._queue: list[int] = []  # shards that nobody has
        self._weights: dict[Part, dict[int, int]] = {}  # part -> shard -> weight
        self._requested: set[Part] = set()  # parts that are averaged or in work
        self._averaged: set[Part] = set()
        self._results: dict[int, say.GradientPayload] = {}  # shard -> the message that completed it
        self._ended: dict[int, int] = {}  # shard -> the worker that delivered it
        self._stopping: str | None = None
        self._alone_since = now  # time since which there are too few workers

    # --- events -----------------------------------------------------------------------------------

    def connected(self, peer: Peer, host: str, now: float) -> list[Effect]:
        """Return the effects of a new connection from `host`."""
        if self.stage is WireStage.OVER:
            return [do.Close(peer, "the run is over")]
        self.peers[peer] = AveragingWorker(host, now)
        return []

    def heard(self, peer: Peer, now: float) -> None:
        """Note that bytes of `peer` arrived. They count when `peer` takes part."""
        worker = self.peers.get(peer)
        if worker is not None and worker.phase is not WirePhase.CONNECTED:
            worker.heard = now

    def keeps(self, peer: Peer, upload: Upload) -> bool:
        """Return whether to keep the gradients of `upload`, which has begun; False discards them.

        Raises ProtocolError if `upload` is illegal now or not of this run.
        """
        worker = self.peers.get(peer)
        if worker is None or self.stage is WireStage.OVER:
            return False
        worker.require_legal(upload)
        if not worker.is_due(upload, self.step):
            return False
        worker.require_possible(upload, self.run)
        self._require_like_others(upload)
        return part_of(upload) not in self._requested

    def receive(
        self, peer: Peer, message: say.WireMessage, now: float, *, kept: bool = False
    ) -> list[Effect]:
        """Return the effects of a whole message; an illegal one ends the connection to `peer`.

        `kept` says whether the message's gradients were kept.
        """
        worker = self.peers.get(peer)
        if worker is None or self.stage is WireStage.OVER:
            return []
        worker.heard = now
        try:
            worker.require_legal(message)
            if isinstance(message, say.JoinRequest):
                return self._join(peer, worker, message, now)
            if isinstance(message, UPLOADS):
                return self._upload(peer, worker, message, now, kept=kept)
        except ProtocolError as error:
            return self._drop(peer, str(error), now)
        worker.beats = True
        return []

    def not_finite(self, peer: Peer, upload: Upload, element: int, value: float) -> list[Effect]:
        """Return the effects of a NaN or Inf at `element` of the gradients in `upload`: a halt."""
        return self._halt(self.peers[peer], upload, f"gradients[{element}]={value} in")

    def averaged(self, step: int, part: Part, now: float) -> list[Effect]:
        """Return the effects of a completed AveragePart: send the average to all workers."""
        if self.stage is WireStage.OVER:
            return []
        assert step == self.step, f"an average of step {step} in step {self.step}"
        self._averaged.add(part)
        effects: list[Effect] = []
        for peer, worker in self._workers().items():
            if worker.takes_part:
                effects += self._tell(peer, worker, part)
        return effects + self._go_on(now)

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Return the effects of a connection to `peer` that is lost or must end."""
        return self._drop(peer, reason, now) if peer in self.peers else []

    def tick(self, now: float) -> list[Effect]:
        """Drop workers that take too long; end a run that waited too long for workers."""
        effects: list[Effect] = []
        if self.stage is WireStage.OVER:
            return []
        for peer, worker in list(self.peers.items()):
            if why := self._overdue(worker, now):
                effects += self._drop(peer, why, now)
        waited = now - self._alone_since
        if not self._has_enough() and waited >= self.patience.gather_s:
            here = len(self._workers())
            reason = f"step {self.step} has waited {waited:.0f} s for workers; {here} are present"
            effects += self._end("failed", reason)
        return effects

    def stop(self, reason: str, *, at_once: bool = False) -> list[Effect]:
        """Return the effects that end the run before its next step, or at once if `at_once`."""
        if self.stage is WireStage.OVER:
            return []
        if at_once or self.stage is WireStage.GATHERING or not self._workers():
            return self._end("stopped", reason)
        self._stopping = reason
        return []

    # --- joining and leaving ----------------------------------------------------------------------

    def _join(
        self, peer: Peer, worker: AveragingWorker, request: say.JoinRequest, now: float
    ) -> list[Effect]:
        taken = {other.worker_id for other in self.peers.values()}
        free = next((place for place in range(self.run.world_size) if place not in taken), None)
        late = self.stage is WireStage.AVERAGING
        if free is None:
            size = self.run.world_size
            raise ProtocolError(f"{request.node_id!r} asks to join: all {size} places are taken")
        if late and not self.run.late_joins:
            raise ProtocolError(
                f"{request.node_id!r} asks to join in step {self.step}: the run admits no late "
                "workers"
            )
        worker.worker_id, worker.node_id = free, request.node_id
        accepted = say.JoinAccepted(worker_id=free, total_workers=self.run.world_size)
        effects: list[Effect] = [wire.Admit(peer), wire.Tell(peer, accepted)]
        effects.append(wire.Enlist(free, self.step, late, request))
        if late:
            return effects + self._deal(now)
        return effects + (self._begin(now) if self._has_enough() else [])

    def _drop(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        worker = self.peers.pop(peer)
        effects: list[Effect] = [do.Close(peer, reason)]
        if worker.worker_id is None:
            return effects
        effects.append(do.Left(worker.worker_id, self.step, reason))
        if worker.shard is not None:
            for part in set(worker.extents) - self._requested:
                del self._weights[part][worker.shard]
                effects.append(wire.VoidPart(worker.shard, part))
            insort(self._queue, worker.shard)
        if not self._workers() and self.stage is not WireStage.OVER:
            self._alone_since = now
            if self._stopping is not None:
                return effects + self._end("stopped", self._stopping)
        return effects + self._deal(now)

    def _overdue(self, worker: AveragingWorker, now: float) -> str:
        """Return why to drop `worker`; "" if it still has time."""
        silent = now - worker.heard
        if worker.phase is WirePhase.CONNECTED:
            return "no JoinRequest in time" if silent >= self.patience.hello_s else ""
        if worker.phase is WirePhase.IDLE:
            return ""
        if worker.beats and silent >= self.patience.dead_after_s:
            return f"silent for {silent:.1f} s"
        busy = now - worker.since
        return f"{busy:.0f} s over one shard" if busy >= self.patience.shard_s else ""

    def _has_enough(self) -> bool:
        num_workers = len(self._workers())
        return num_workers >= (1 if self.stage is WireStage.AVERAGING else self.run.num_awaited)

    def _workers(self) -> dict[Peer, AveragingWorker]:
        return {peer: one for peer, one in self.peers.items() if one.worker_id is not None}

    # --- a step -----------------------------------------------------------------------------------

    def _begin(self, now: float) -> list[Effect]:
        """Begin `step`, or end the run after its last step or a request to stop."""
        if self.step == self.run.num_steps:
            return self._end("completed", "")
        if self._stopping is not None:
            return self._end("stopped", self._stopping)
        self.stage = WireStage.AVERAGING
        self._shards = self.run.shards(self.step)
        self._queue = list(range(len(self._shards)))
        for state in (self._weights, self._requested, self._averaged, self._results, self._ended):
            state.clear()
        for worker in self._workers().values():
            worker.begin_step()
        return [wire.BeginStep(self.step), *self._deal(now)]

    def _deal(self, now: float) -> list[Effect]:
        """Assign free shards to idle workers, first to the workers that delivered the fewest."""
        idle = [(w.num_done, w.worker_id, peer) for peer, w in self._workers().items()]
        idle = [one for one in idle if self.peers[one[2]].phase is WirePhase.IDLE]
        effects: list[Effect] = []
        for _, _, peer in sorted(idle, key=lambda one: one[:2]):
            if not self._queue or self.stage is not WireStage.AVERAGING:
                break
            shard = self._queue.pop(0)
            self.peers[peer].assign(shard, now)
            ids = self._shards[shard]
            assignment = say.ShardAssignment(step=self.step, start=ids.start, end=ids.stop)
            effects.append(wire.Tell(peer, assignment))
        return effects

    def _upload(
        self, peer: Peer, worker: AveragingWorker, upload: Upload, now: float, *, kept: bool
    ) -> list[Effect]:
        part, step = part_of(upload), self.step
        if not worker.is_due(upload, step) or not (kept or part in self._requested):
            worker.num_ignored += 1
            return []
        shard, place = worker.shard, worker.worker_id
        assert shard is not None, "what is due is for a shard"
        assert place is not None, "a shard has a worker"
        worker.require_possible(upload, self.run)
        self._require_like_others(upload)
        if isinstance(upload, say.GradientPayload):
            if not math.isfinite(upload.loss):
                return self._halt(worker, upload, f"loss={upload.loss} with")
            self._require_end(worker, upload)
        worker.take(upload)
        self._known.setdefault(part, worker.extents[part])
        self._num_blocks = self._num_blocks or worker.num_blocks
        effects: list[Effect] = []
        if part not in self._requested:
            total = upload.total if isinstance(upload, say.GradientPayload) else None
            self._weights.setdefault(part, {})[shard] = (
                len(self._shards[shard]) if total is None else total
            )
            effects.append(wire.KeepPart(place, shard, part))
        if self._is_complete(worker, upload):
            self._ended[shard] = place
            self._end_shard(worker, shard, upload)
        if part in self._averaged:
            effects += self._tell(peer, worker, part)
        return effects + self._request(part) + self._deal(now) + self._go_on(now)

    def _require_like_others(self, upload: Upload) -> None:
        """Raise ProtocolError if the part is unknown or its length has changed."""
        part, extent = part_of(upload), Extent.of(upload)
        if isinstance(upload, say.BlockGradient) and self._num_blocks not in (0, upload.num_blocks):
            raise ProtocolError(f"num_blocks={upload.num_blocks}: it was {self._num_blocks} before")
        if self.layout is not None and part not in self.layout:
            raise ProtocolError(f"{part}: no gradient of this run has this part")
        known = self._known.get(part, extent)
        if known != extent:
            raise ProtocolError(
                f"{part}: gradients={extent.num_gradients} of components "
                f"{list(extent.component_sizes)}: the first ones had {known.num_gradients} of "
                f"{list(known.component_sizes)}"
            )

    def _is_complete(self, worker: AveragingWorker, upload: Upload) -> bool:
        if self.run.components is None:
            return isinstance(upload, say.GradientPayload)
        expected = parts_of(self.run.components, max(worker.num_blocks, 1))
        return set(worker.extents) == expected

    def _require_end(self, worker: AveragingWorker, ending: say.GradientPayload) -> None:
        """Raise ProtocolError if a shard can't end with `ending`."""
        if ending.correct > ending.total:
            raise ProtocolError(f"correct={ending.correct} of total={ending.total}: use fewer")
        assert worker.shard is not None, "only a shard can end"
        size = len(self._shards[worker.shard])
        # it would outweigh all other shards, and a ledger can't hold 64 bits
        if ending.total > size:
            raise ProtocolError(
                f"total={ending.total} of a shard with {size} samples: use at most {size}"
            )
        if not ending.gradients and not worker.extents:
            raise ProtocolError("gradients=0: the shard has no gradient at all")
        missing = lacking(worker.extents, worker.num_blocks)
        came = {*worker.extents, WHOLE}
        if self.layout is not None:
            missing = sorted(set(self.layout) - came)
        if missing:
            raise ProtocolError(f"GradientPayload ends a shard that lacks {missing[0]}")
        if self.layout is not None and (more := sorted(came - set(self.layout))):
            raise ProtocolError(f"GradientPayload ends a shard that has {more[0]}, unlike others")

    def _end_shard(self, worker: AveragingWorker, shard: int, ending: Upload) -> None:
        if self.layout is None:
            self.layout = dict(worker.extents)
        if isinstance(ending, say.GradientPayload):
            self._results[shard] = ending
        worker.end_shard()

    def _request(self, part: Part) -> list[Effect]:
        """Request the average of `part` if it has arrived for every shard."""
        weights = self._weights.get(part, {})
        if part in self._requested or len(weights) < len(self._shards):
            return []
        self._requested.add(part)
        if not sum(weights.values()):
            reason = f"no sample counts in step {self.step}: every total is 0"
            return self._end("halted", reason)
        ordered = tuple(weights[shard] for shard in sorted(weights))
        return [wire.AveragePart(self.step, part, ordered)]

    def _tell(self, peer: Peer, worker: AveragingWorker, part: Part) -> list[Effect]:
        """Send the average of `part` to `worker`, unless this was already done in this step."""
        if part in worker.told:
            return []
        worker.told.add(part)
        step, extent = self.step, self._known[part]
        num, message = extent.num_gradients, say.WireMessage()
        if part == WHOLE:
            message = say.AveragedGradient(step=step, gradients=num, loss=self._loss() or 0.0)
        elif part.tag == say.BlockGradient.tag:
            sizes = extent.component_sizes
            message = say.AveragedBlock(
                step=step, block=part.number, component_sizes=sizes, gradients=num
            )
        else:
            message = say.AveragedNonBlock(step=step, component=part.number, gradients=num)
        return [wire.Tell(peer, message, part)]

    def _loss(self) -> float | None:
        results = [self._results[shard] for shard in sorted(self._results)]
        total = sum(result.total for result in results)
        if not total:
            return None
        return math.fsum(result.loss * result.total for result in results) / total

    def _go_on(self, now: float) -> list[Effect]:
        """If all shards are delivered and all parts averaged, end the step and begin the next."""
        if self.stage is not WireStage.AVERAGING or self.layout is None:
            return []
        if len(self._ended) < len(self._shards) or self._averaged != set(self.layout):
            return []
        results = list(self._results.values())
        made_step = wire.MadeStep(
            step=self.step,
            workers=tuple(sorted(set(self._ended.values()))),
            parts=tuple(sorted(self.layout)),
            num_samples=sum(map(len, self._shards)),
            loss=self._loss(),
            correct=sum(result.correct for result in results) if results else None,
            total=sum(result.total for result in results) if results else None,
        )
        self.step += 1
        return [made_step, *self._begin(now)]

    # --- the end ----------------------------------------------------------------------------------

    def _halt(self, worker: AveragingWorker, upload: Upload, what: str) -> list[Effect]:
        reason = (
            f"non-finite {what} {part_of(upload)} of step {upload.step} from {worker.name()}: "
            "training halted, no average of it was sent"
        )
        return self._end("halted", reason)

    def _end(self, status: str, reason: str) -> list[Effect]:
        self.stage = WireStage.OVER
        tells = [wire.Tell(peer, say.Shutdown()) for peer in self._workers()]
        closes = [do.Close(peer, reason or "the run is complete") for peer in self.peers]
        self.peers.clear()
        return [*tells, *closes, do.Finish(status, reason)]
