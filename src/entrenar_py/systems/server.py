"""What a parameter server does besides talking: adds, averages, keeps the state and the record."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from entrenar_py import backends, trace
from entrenar_py.errors import ProtocolError, TraceError
from entrenar_py.protocol.effects import Joined, Left, Stop
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import (
    Applied,
    Average,
    Computed,
    Loaded,
    Message,
    NonFinite,
    TreeNode,
    Welcome,
)
from entrenar_py.protocol.terms import Terms
from entrenar_py.scenario import Scenario
from entrenar_py.systems import replicas
from entrenar_py.systems.replicas import Replicas
from entrenar_py.training import checkpoint, optimizer, reduction, sharding, state
from entrenar_py.training.tensors import LinearFunction

# Room for the events of a message: names, numbers and digests, of each shard and tensor.
_EVENTS_BYTES = 2**20
_NOBODY = -1

# What a worker may record of itself, by the message that brings it.
_RECORDS: dict[type[Message], tuple[type[trace.Event], ...]] = {
    Loaded: (trace.Attempt, trace.Start),
    Computed: (trace.Shard, trace.Injected),
    NonFinite: (trace.Shard, trace.Injected),
    Applied: (trace.Update,),
}


class Server(Replicas):
    """The run as the coordinator holds it: a replica of its own, and everyone's record."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.present: set[int] = set()
        self.checkpoint_path: Path | None = None
        self.replica = self.new_worker(_NOBODY, self.initial())
        self._pending: dict[int, list[reduction.Node]] = {}  # rank -> nodes not yet all there
        self._nodes: list[reduction.Node] = []  # of whole deliveries, folded
        self._average: replicas.Average | None = None
        self._ids = self.batch()

    def linear_of(self, rank: int) -> LinearFunction:
        """The server computes no gradient: it needs no worker's device."""
        return backends.open_backend("cpu").linear

    @property
    def terms(self) -> Terms:
        """What everyone who takes part must have, too."""
        return Terms(
            run=self.scenario.digest,
            manifest=self.layout.digest,
            data=self.workload.data_digest,
        )

    @property
    def _state_bytes(self) -> int:
        return state.num_bytes(self.workload.specs, self.scenario.optimizer)

    def sizes(self) -> dict[type[Message], int]:
        """The most payload bytes that a message of each kind may bring."""
        events = _EVENTS_BYTES + 8 * (self.scenario.num_shards + 2) * self._state_bytes
        return {
            TreeNode: self.vector_bytes,
            Loaded: events,
            Computed: events,
            NonFinite: events,
            Applied: events,
        }

    def require(self, rank: int, message: Message, payload: bytearray) -> None:
        """Returns if `payload` is what `message` of `rank` must carry; ProtocolError if not."""
        if isinstance(message, TreeNode) and len(payload) != self.vector_bytes:
            raise ProtocolError(
                f"TreeNode with {len(payload)} bytes: the manifest makes {self.vector_bytes}"
            )
        if isinstance(message, TreeNode):
            most = self.workload.weight_max * self.scenario.batch_size
            if not (0 <= message.weight <= most and math.isfinite(message.loss)):
                raise ProtocolError(
                    f"TreeNode weight={message.weight} loss={message.loss}: "
                    f"use 0 to {most}, and a finite loss (NonFinite says the others)"
                )
        if message.carries == "events":
            self._events(rank, message, payload)

    def keep(self, rank: int, message: Message, payload: bytearray) -> None:
        """Takes over what `message` carries, which `require` has seen."""
        if isinstance(message, TreeNode):
            vector = np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
            node = reduction.Node(
                message.level, message.index, vector, message.loss, message.weight
            )
            self._pending.setdefault(rank, []).append(node)
            return
        for event in self._events(rank, message, payload):
            self.recorder.emit(event)
        if isinstance(message, Computed):
            nodes = [*self._nodes, *self._pending.pop(rank, [])]
            self._nodes = reduction.fold(nodes, self.scenario.num_shards)

    def joined(self, effect: Joined) -> None:
        """Records who came late; those of the beginning need no mention."""
        self.present.add(effect.rank)
        if effect.late:
            self.recorder.emit(
                trace.Membership(step=effect.step, rank=effect.rank, change="joined")
            )

    def left(self, effect: Left) -> None:
        """Forgets what a worker that is gone had not wholly delivered."""
        self.present.discard(effect.rank)
        self._pending.pop(effect.rank, None)
        self.recorder.emit(
            trace.Membership(
                step=effect.step, rank=effect.rank, change="left", reason=effect.reason
            )
        )

    def gather(self, step: int) -> None:
        """Forgets what was delivered of a step that did not happen."""
        self._pending.clear()
        self._nodes, self._average = [], None

    def reduce(self) -> tuple[float, float] | str:
        """Adds and averages: the summed loss and its weight; a reason where that is not finite."""
        total = reduction.root(self._nodes, self.scenario.num_shards)
        mean = optimizer.mean(total.vector, total.weight * self.scale)
        if not (np.isfinite(mean).all() and np.isfinite(total.loss)):
            return "the average gradient or loss is not finite, though every worker said its was"
        self._average = self.averaged(mean, total.loss, total.weight)
        return total.loss, total.weight

    def average_held(self) -> replicas.Average:
        """The average of the step in work, from its reduction on."""
        assert self._average is not None, "a step is made after it was reduced"
        return self._average

    def apply_average(self, step: int) -> None:
        """Makes `step` here, too."""
        self.make(self.replica, step, self.average_held())
        self.advance(len(self._ids))
        self._ids = self.batch()

    def stop(self, effect: Stop) -> None:
        """Records that training halts."""
        said = effect.said
        self.recorder.emit(
            trace.Halt(
                step=effect.step,
                reason=effect.reason,
                rank=effect.rank,
                shard=None if said is None else said.shard,
                tensor=None if said is None else said.tensor,
                ids=() if said is None else said.ids,
            )
        )

    def save(self, step: int) -> None:
        """Writes the checkpoint before `step`; recorded as the lowest rank's, whose state it is."""
        assert self.checkpoint_path is not None, "a run that saves has a place for it"
        progress = self.progress(step)
        checkpoint.save(
            self.checkpoint_path,
            checkpoint.as_arrays(tensors=self.replica.replica.arrays, optimizer=self.replica.state),
            progress,
        )
        rank = min(self.present, default=0)
        saved = trace.Saved(step=step, rank=rank, progress=progress, **self.state(self.replica))
        self.recorder.emit(saved)

    def restore(self) -> int:
        """Takes the state from the checkpoint, the initial one if there is none; the next step."""
        assert self.checkpoint_path is not None
        self.present.clear()
        if not self.checkpoint_path.exists():
            self.replica = self.new_worker(_NOBODY, self.initial())
            self.position, self.schedule_step = sharding.Position(), 0
            self._ids = self.batch()
            return 0
        arrays, progress = checkpoint.load(self.checkpoint_path)
        self.replica = self.new_worker(_NOBODY, checkpoint.group_of(arrays, "tensors"))
        saved = checkpoint.group_of(arrays, "optimizer")
        self.replica.state = {name: saved[name].copy() for name in self.replica.state}
        self.position = sharding.Position(progress["epoch"], progress["offset"])
        self.schedule_step = progress["schedule_step"]
        self._ids = self.batch()
        return int(progress["step"])

    def payload(self, message: Message) -> Buffer:
        """What `message` carries: the whole state, or the averaged gradient."""
        if isinstance(message, Welcome):
            specs, kind = self.workload.specs, self.scenario.optimizer
            stands = state.Progress(position=self.position, schedule_step=self.schedule_step)
            worker = self.replica
            return state.dump(specs, kind, stands, worker.replica.arrays, worker.state)
        if isinstance(message, Average):
            return self.average_held().mean.astype("<f4", copy=False).data.cast("B")
        return b""

    def _events(self, rank: int, message: Message, payload: bytearray) -> list[trace.Event]:
        """What `rank` tells of itself; ProtocolError if it tells of another, or another thing."""
        try:
            events = trace.load_events(bytes(payload))
        except TraceError as error:
            raise ProtocolError(f"{type(message).__name__}: {error}") from error
        step = getattr(message, "step", None)
        for event in events:
            if not isinstance(event, _RECORDS[type(message)]):
                raise ProtocolError(f"{type(message).__name__} with an event {event.kind}")
            if isinstance(event, trace.Attempt):
                continue  # of nobody, and of no step
            place = (getattr(event, "rank", None), getattr(event, "step", None))
            if place != (rank, step):
                raise ProtocolError(
                    f"{type(message).__name__} of rank {rank} in step {step} tells of another"
                )
        return events
