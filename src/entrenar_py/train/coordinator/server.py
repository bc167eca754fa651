"""The work of a coordinator: it adds and averages gradients, and keeps the state and the record.

The protocol's state machine (`train/wire/coordinator.py`) decides, and its endpoint carries out
each decision by a call to a `Server`. A step is `gather`; then `require`, `keep` and `deliver` for
each delivery; then `complete` and `reduce` for each block, in any thread; and finally
`apply_average`. If the server applies the optimizer, `prepare` comes before that.

A payload is taken over together with its memory, which `room` provides, because copying every
gradient would double the memory of a large model.

`replica` is the state before the next step. The step of a large model is applied in the background,
while workers compute their next shards; every reader of `replica` waits for that first. If the
server applies the optimizer, it prepares the step on a second replica: if all workers are lost
before the step is applied, it did not happen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from entrenar_py import compute as backends
from entrenar_py.shared import trace, workers
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import blocks, checkpoint, sharding
from entrenar_py.train.arithmetic.reduction import Aside, Node, at_once
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.coordinator import audits, recorder, replicas, topology
from entrenar_py.train.coordinator.recorder import Deliveries
from entrenar_py.train.coordinator.replicas import Replicas, Worker
from entrenar_py.train.wire.effects import Conclude, Joined, Left, Stop
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Applied,
    Average,
    Computed,
    Loaded,
    Message,
    NonFinite,
    Offer,
    State,
    Summed,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.terms import Run, Terms
from entrenar_py.train.wire_io.endpoints import ReadPiece, Saving, no_piece

# The space for a message's events: names, numbers and digests of each shard and tensor.
_EVENTS_BYTES = 2**20
_NOBODY = -1
_LARGE = 2**20  # from this many elements on, the server's own step runs in the background


class Server:
    """The coordinator's part of the run: its own replica, the reduction, and the run's record.

    `present` has the ranks that take part. `notes` is the metadata of the last checkpoint that was
    read. `drawn` has the sample ids of the last applied step.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        *,
        checkpoint_path: Path | None = None,
        save: Callable[[int], Saving] | None = None,
        clock: Callable[[], float] = time.monotonic,
        workload: Workload | None = None,
        objection: Callable[[float], str | None] | None = None,
        piece: ReadPiece = no_piece,
        deliveries: type[Deliveries] = Deliveries,
    ) -> None:
        """Start a run without a state, which `restore` provides.

        `save` returns a function that saves the state before a given step; by default it is
        `write_checkpoint`. `objection` is called in any thread with the norm of each step's reduced
        gradient, and returns the reason to halt before the step, or None. `piece` reads pieces of
        the files that workers fetch.
        """
        cpu = backends.open_backend("cpu")
        self.plan = plan
        self.replicas = Replicas(plan, lambda rank: cpu, workload)  # computes no shard
        num_elements, scale = self.replicas.layout.num_elements, self.replicas.scale
        parts = blocks.Blocks(num_elements, topology.num_blocks(plan, num_elements))
        self.reduction = blocks.Reduction(
            parts, num_shards=plan.num_shards, scale=scale, clock=clock
        )
        self._copies = audits.Copies()
        self.recorder = self.replicas.recorder
        self.deliveries = deliveries(self.recorder)
        self.present: set[int] = set()
        self.checkpoint_path = checkpoint_path
        self.save = save or self.write_checkpoint
        self.piece = piece
        self.notes: Mapping[str, Any] = {}
        self._replica = self.replicas.new_worker(_NOBODY, self.replicas.initial())
        self.drawn: sharding.Ids = []
        self._objection = objection
        self._topology = topology.of(plan)
        self._updates = workers.by_server(plan)
        self._beside: Worker | None = None  # the replica on which steps are prepared
        self._average: Callable[[], replicas.Average] | None = None
        self._moved: Callable[[], None] = lambda: None  # waits until the last step is applied
        self._start = Aside().start if num_elements >= _LARGE else at_once

    @property
    def replica(self) -> Worker:
        """The state before the next step; waits for a step that is applied in the background."""
        self._moved()
        return self._replica

    @replica.setter
    def replica(self, worker: Worker) -> None:
        self._moved()
        self._replica = worker

    @property
    def terms(self) -> Terms:
        """The digests that must be the same in all processes of the run."""
        return self.replicas.terms

    def run_between(self, first: int, last: int) -> Run:
        """Return the run from step `first` to step `last`, exclusive, as the plan describes it.

        The caller adds the ranks to await, and the steps before which to save.
        """
        return Run(
            terms=self.terms,
            world_size=self.plan.world_size,
            num_shards=self.plan.num_shards,
            num_steps=last,
            num_blocks=self.reduction.blocks.count,
            first_step=first,
            resumed=first > 0,
            audited=partial(audits.shards, self.plan),
            server_updates=self._updates,
        )

    @property
    def _state_bytes(self) -> int:
        return checkpoint.state_bytes(self.replicas.layout.specs, self.plan.optimizer)

    def sizes(self) -> dict[type[Message], int]:
        """Return the largest payload, in bytes, that each type of message may have."""
        events = _EVENTS_BYTES + 8 * (self.plan.num_shards + 2) * self._state_bytes
        recorded = (Loaded, Computed, Summed, NonFinite, Applied)
        sizes: dict[type[Message], int] = dict.fromkeys(recorded, events)
        return {**sizes, TreeNode: self.reduction.blocks.num_bytes_max, State: self._state_bytes}

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Return memory for the payload of `message`, which may never arrive completely."""
        if isinstance(message, TreeNode):
            return self.reduction.sums.room(num_bytes)
        return new_room(message, num_bytes)

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError if `payload` is not valid for `message` from `rank`."""
        if isinstance(message, TreeNode):
            parts = self.reduction.blocks
            due = parts.num_bytes(message.block) if message.block < parts.count else len(payload)
            if len(payload) != due:
                raise ProtocolError(
                    f"TreeNode block={message.block} with {len(payload)} bytes: "
                    f"the manifest requires {due}"
                )
            self.replicas.require_sum(message)
        if isinstance(message, State):
            if len(payload) != self._state_bytes:
                raise ProtocolError(f"State of {len(payload)} bytes: expected {self._state_bytes}")
            self.replicas.require_progress(payload)
        if message.carries == "events":
            events = self.deliveries.read(rank, message, payload)
            makes_step = isinstance(message, Applied) and self._topology is not topology.STAR
            if makes_step and recorder.update_in(events) is None:
                raise ProtocolError("Applied: the loss of its step is missing")

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        """Take over the payload of `message` with its memory, after `require` has accepted it."""
        if isinstance(message, TreeNode):
            self.reduction.sums.take(rank, message.block, _node(message, payload), payload)
            return
        if isinstance(message, State):
            self.replica = self.replicas.take_over(_NOBODY, payload)
            return
        events = self.deliveries.read(rank, message, payload)
        if isinstance(message, Computed | Summed):
            self.deliveries.keep(rank, events)
        else:
            self.recorder.record(map(self._completed, events) if self._updates else events)

    def deliver(self, rank: int) -> None:
        """Add the nodes and record the events of the delivery that `rank` has completed."""
        self.reduction.sums.deliver(rank)
        self.deliveries.deliver(rank)

    def copy(self, rank: int, message: Message, payload: Buffer) -> None:
        """Take over a part of a copy of an audited shard; copies are compared later."""
        if isinstance(message, TreeNode):
            self._copies.take(rank, message.block, _node(message, payload), payload)
        else:
            self._copies.begin(rank, self.deliveries.read(rank, message, payload))

    def end_copy(self, rank: int, shard: int) -> None:
        """Note that the copy of `shard` from `rank` is complete."""
        self._copies.end(rank, shard)

    def compare(self, shard: int) -> Callable[[], tuple[list[int], list[int]]]:
        """Return a function, to be called in any thread, that compares the copies of `shard`.

        The function returns the rank of each copy, and for each copy the index of the first equal
        copy.
        """
        whole = self._copies.of(shard)
        return lambda: ([one.rank for one in whole], audits.alike(whole))

    def conclude(self, effect: Conclude) -> None:
        """Use the copy that counts, and record the audit."""
        chosen, events = self._copies.conclude(effect, self._locate)
        self.recorder.record(events)
        if chosen is not None:
            for block, (node, payload) in chosen.nodes.items():
                self.reduction.sums.take(_NOBODY, block, node, payload)
            self.reduction.sums.deliver(_NOBODY)

    def joined(self, effect: Joined) -> None:
        """Note that a rank takes part; record that if the rank joined after the start."""
        self.present.add(effect.rank)
        if effect.late:
            self.recorder.emit(
                trace.Membership(step=effect.step, rank=effect.rank, change="joined")
            )

    def left(self, effect: Left) -> None:
        """Forget the unfinished delivery of a worker that left, and record that it left."""
        self.present.discard(effect.rank)
        self.reduction.sums.forget(effect.rank)
        self.deliveries.forget(effect.rank)
        self.recorder.record(self._copies.forget(effect.rank))
        self.recorder.emit(
            trace.Membership(
                step=effect.step, rank=effect.rank, change="left", reason=effect.reason
            )
        )

    def gather(self, step: int) -> None:
        """Forget everything delivered so far: `step` begins or restarts."""
        self.reduction.clear()
        self._copies.clear()
        self.deliveries.clear()
        self._average = None

    def complete(self, block: int) -> None:
        """Note that `block` is complete: `reduce` may then be called, in any thread."""
        self.reduction.sums.complete(block)

    def reduce(self, block: int) -> tuple[float, float] | str:
        """Average `block`; return its summed loss and its weight, or the reason to halt."""
        # the last step may still read the previous average, and this one reuses its memory
        self._moved()
        averaged = self.reduction.reduce(block)
        if averaged is None:
            return "the average gradient or loss is not finite, though each worker's is"
        if self.reduction.is_complete:
            vector, total = self.reduction.vector, self.reduction.total
            self._average = self._start(partial(self.replicas.averaged, vector, *total))
            if self._objection is not None:
                return self._objection(self._average().clipped.norm) or averaged
        return averaged

    def average_held(self) -> replicas.Average:
        """Return the average of the current step; all its blocks must be reduced."""
        assert self._average is not None, "it is reduced"
        return self._average()

    def prepare(self, step: int) -> tuple[float, float]:
        """Return summed loss and weight of `step`, after applying it on a second replica.

        May be called in any thread.
        """
        average = self.average_held()
        if self._beside is None:
            self._beside = self.replicas.new_worker(_NOBODY, self.replica.replica.arrays)
        self._beside.follow(self.replica)
        self.replicas.move(self._beside, average.clipped, average.mean)
        _ = average.record  # recorded now, because the vector changes next
        self._beside.replica.copy_to(self.reduction.vector)
        return self.reduction.total

    def apply_average(self, step: int) -> None:
        """Apply `step` on the server's replica, or switch to the replica that `prepare` updated."""
        if self._updates:
            assert self._beside is not None, "what is applied was prepared"
            self.replica, self._beside = self._beside, self.replica
        else:
            average = self.average_held()
            move = partial(self.replicas.move, self._replica, average.clipped, average.mean)
            self._moved = self._start(move)
        self.drawn = self.replicas.batch()
        self.replicas.advance(len(self.drawn))

    def stop(self, effect: Stop) -> None:
        """Record that training halts."""
        report = effect.said
        self.recorder.emit(
            trace.Halt(
                step=effect.step,
                reason=effect.reason,
                rank=effect.rank,
                shard=effect.shard if report is None else report.shard,
                tensor=None if report is None else report.tensor,
                ids=() if report is None else report.ids,
            )
        )

    def write_checkpoint(self, step: int, notes: Mapping[str, Any] | None = None) -> Saving:
        """Return a function that writes the checkpoint before `step`, with `notes`.

        The state must not change before it has returned. It may be called in any thread, and raises
        OSError if the file can't be written. What it returns records the checkpoint under the
        lowest rank.
        """
        path, progress = self.checkpoint_path, self.replicas.progress(step)
        rank = min(self.present, default=0)
        assert path is not None, "a run that saves has a place for it"

        def write() -> Callable[[], None]:
            description = {**progress, "plan": self.plan.to_dict(), **(notes or {})}
            checkpoint.save(path, self.replica.checkpoint, description)
            state = self.replicas.state(self.replica)
            saved = trace.Saved(step=step, rank=rank, progress=progress, **state)
            return partial(self.recorder.emit, saved)

        return write

    def restore(self) -> int:
        """Return the next step, after loading the checkpoint, or the initial state if none exists.

        Raises CheckpointError, which names the difference, if the checkpoint has a different plan
        or does not fit.
        """
        assert self.checkpoint_path is not None
        self.present.clear()
        if not self.checkpoint_path.exists():
            self.replica = self.replicas.new_worker(_NOBODY, self.replicas.initial())
            self.replicas.position, self.replicas.schedule_step = sharding.Position(), 0
            return 0
        expected = self.replica.checkpoint
        largest = checkpoint.bytes_max(expected)
        arrays, progress = checkpoint.load(self.checkpoint_path, bytes_max=largest)
        checkpoint.require_own(self.checkpoint_path, progress, self.plan.to_dict())
        steps, samples = self.plan.num_steps, self.plan.num_samples
        limits = {"step": steps, "schedule_step": steps, "epoch": steps, "offset": samples}
        checkpoint.require_fitting(
            self.checkpoint_path, arrays, progress, expected=expected, limits=limits
        )
        self.notes = progress
        tensors, moments = (checkpoint.group_of(arrays, one) for one in ("tensors", "optimizer"))
        self.replica = self.replicas.new_worker(_NOBODY, tensors, moments)
        self.replicas.go_to(progress)
        return int(progress["step"])

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`: a state, the average, new weights, or the plan."""
        if isinstance(message, Welcome):
            return self.replicas.dump(self.replica)
        if isinstance(message, Offer):
            return json.dumps(self.plan.to_dict(), sort_keys=True).encode()
        if isinstance(message, Average | Weights):
            return blocks.payload_of(self.reduction.part(message.block))
        return b""

    def _completed(self, event: trace.Event) -> trace.Event:
        """Return `event`; an Update gets the values that only the server knows."""
        if not isinstance(event, trace.Update):
            return event
        average = self.average_held()
        return replace(
            event,
            learning_rate=average.clipped.rate,
            gradient=average.record,
            grad_norm=average.clipped.norm,
            applied_norm=average.clipped.applied_norm,
        )

    def _locate(self, block: int, place: int) -> tuple[str, int]:
        return self.replicas.layout.locate(self.reduction.blocks.part(block).start + place)


def _node(message: TreeNode, payload: Buffer) -> Node:
    """Return the node of `message`; its vector is a view of `payload`."""
    vector = blocks.vector_of(payload)
    return Node(message.level, message.index, vector, message.loss, message.weight)
