"""The workers of one run in this process: their shards, their steps, and their records.

Every system that trains with logical shards and the tree uses this module. The system itself is
responsible for communication between workers.

A shard's gradient is a sum over its samples, at an exact power-of-two scale, and is recorded before
anything else can change it. Clipping and the optimizer use the average over the batch. It is
computed once and given to each worker, so that replicas can't diverge through rounding. Data order,
dropout and initial weights are drawn from the seed and the place of the draw (epoch, step, shard),
never from a generator with a running state: a worker that takes over a shard draws the same numbers
as the lost worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from entrenar_py.compute import Stepping
from entrenar_py.shared import trace, workers
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.shared.faults import PLANTED, Fault
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import (
    blocks,
    checkpoint,
    engine,
    on_device,
    optimizer,
    reduction,
    sharding,
)
from entrenar_py.train.arithmetic.checkpoint import Buffer
from entrenar_py.train.arithmetic.on_device import DeviceOptimizer
from entrenar_py.train.arithmetic.tensors import Array, Workload
from entrenar_py.train.coordinator import models
from entrenar_py.train.coordinator.models import Devices
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.wire.messages import Partial, TreeNode
from entrenar_py.train.wire.terms import Terms


@dataclass
class Worker:
    """One worker: its replica and its optimizer state.

    If `on_device` is not None, it takes the steps, and `settle` copies their results to the host.
    `begun` has the shards, by step and number, that the device is already computing.
    """

    rank: int
    replica: engine.Engine
    state: optimizer.State
    on_device: DeviceOptimizer | None = None
    begun: dict[tuple[int, int], engine.BegunShard] = field(default_factory=dict)

    def move_to_device(self, rule: optimizer.Rule) -> None:
        """Take all further steps on the replica's device, if it keeps the weights."""
        resident, size = self.replica.resident, self.replica.layout.num_trainable
        if resident is not None and self.state and on_device.fits(rule, size):
            with resident.failures():
                resident.upload()
                self.on_device = DeviceOptimizer(
                    rule, resident.weights, self.state, resident.failures
                )

    def settle(self) -> None:
        """Wait until the host has the weights and the state after the last step."""
        if self.on_device is not None:
            self.on_device.copy_back(self.replica.parameters)

    @property
    def checkpoint(self) -> dict[str, Array]:
        """The tensors and the optimizer's state, not copied, by their names in a checkpoint."""
        return checkpoint.as_arrays(tensors=self.replica.arrays, optimizer=self.state)

    def follow(self, other: Worker) -> None:
        """Copy all values that training changes from `other`. Both take steps on the host."""
        assert self.on_device is None, "its moments would stay as they are"
        self.replica.parameters[:] = other.replica.parameters
        for name, buffer in other.replica.buffers.items():
            self.replica.buffers[name][...] = buffer
        for name, moments in other.state.items():
            self.state[name][:] = moments
        self.replica.changed()


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """The `gradient` of one step after clipping, and the learning `rate`.

    `gradient` is on the device that takes the steps, or on the host. `norm` is the L2 norm before
    clipping, and `norm_of` computes such a norm. `is_as_before` is true if clipping changed
    nothing.
    """

    gradient: Any
    norm: float
    rate: float
    norm_of: Callable[[Any], float]
    is_as_before: bool

    @cached_property
    def applied_norm(self) -> float:
        """The L2 norm after clipping, computed at its first use."""
        return self.norm if self.is_as_before else self.norm_of(self.gradient)


@dataclass(frozen=True, kw_only=True)
class Average:
    """The average of one step: `mean` is the averaged vector, `clipped` its clipped gradient.

    `loss` is the batch's summed loss divided by its `weight`.
    """

    mean: Array
    loss: float
    weight: float
    clipped: Clipped
    recorded: Callable[[], trace.Tensors]

    @cached_property
    def record(self) -> trace.Tensors:
        """The record of the gradient before clipping, computed at its first use."""
        return self.recorded()


class Replicas:
    """The workers in this process, the position in the data, and the record of both."""

    def __init__(
        self,
        plan: TrainingPlan,
        backend_of: Callable[[int], Stepping] | None = None,
        workload: Workload | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Start without workers.

        `backend_of` returns a rank's backend. By default, backends and `workload` are the plan's.
        `faults` are injected.
        """
        self.plan, self.faults = plan, faults
        self.recorder = Recorder(plan)
        self.devices = Devices(plan, self.recorder)
        self.backend_of: Callable[[int], Stepping] = backend_of or self.devices.of
        self.workload = workload or models.model_of(plan)
        self.layout = blocks.Layout(self.workload.specs)
        self.rule = optimizer.Rule(plan.optimizer, plan.weight_decay, self.layout.decayed)
        self.scale = engine.scale_of(self.workload.weight_max * plan.batch_size)
        self.position = sharding.Position()
        self.schedule_step = 0
        self.workers: dict[int, Worker] = {}
        self._visit: tuple[int, sharding.Ids] | None = None

    @property
    def terms(self) -> Terms:
        """Digests of run, manifest and data, which must be the same in all processes of a run."""
        return Terms(
            run=self.plan.digest,
            manifest=self.layout.digest,
            data=self.workload.data_digest,
        )

    @property
    def vector_bytes(self) -> int:
        """The size in bytes of the flat vector that is reduced."""
        return 4 * self.layout.num_elements

    def initial(self) -> dict[str, Array]:
        """Return the initial tensors of every replica."""
        return self.workload.initial(self.plan.rng("initial"))

    def batch(self, position: sharding.Position | None = None) -> sharding.Ids:
        """Return the sample ids of the next step, or of the step at `position`."""
        position = position or self.position
        return sharding.batch(self._order(position.epoch), position, self.plan.batch_size)

    def position_after(self, drawn: int) -> sharding.Position:
        """Return the position in the data after a step that used `drawn` samples."""
        return sharding.advance(self.position, drawn, self.plan.num_samples)

    def advance(self, drawn: int) -> None:
        """Advance the data position and the schedule past a step that used the samples `drawn`."""
        self.position = self.position_after(drawn)
        self.schedule_step += 1

    def begin(self, worker: Worker, step: int, shard: int, ids: sharding.Ids) -> None:
        """Start to compute a shard with the worker's weights, if its device can start it at once.

        The weights must be those before `step`.
        """
        if (step, shard) in worker.begun:
            return
        if self.plan.accumulation == 1 and not self.plan.dropout:
            begun = worker.replica.begin(ids)
            if begun is not None:
                worker.begun[step, shard] = begun

    def compute(self, worker: Worker, step: int, shard: int, ids: sharding.Ids) -> reduction.Node:
        """Return the leaf of the tree for a shard, and record it; `begin` may have started it."""
        rate = self.plan.dropout
        draws = rate or self.workload.draws
        drop = engine.Dropout(rate, self.plan.rng("dropout", step, shard)) if draws else None
        if (begun := worker.begun.pop((step, shard), None)) is not None:
            vector, loss, weight = begun.wait()
        else:
            vector, loss, weight = worker.replica.shard(
                ids,
                accumulation=self.plan.accumulation,
                drop=drop or engine.no_dropout,
            )
        loss = self.inject(vector, loss, worker, step, shard, len(ids))
        self.recorder.emit(
            trace.Shard(
                step=step,
                epoch=self.position.epoch,
                rank=worker.rank,
                shard=shard,
                ids=tuple(ids),
                loss_sum=loss,
                weight=weight,
                finite=engine.non_finite(vector) is None and math.isfinite(loss),
                draws=drop.digest() if drop else None,
                gradient=self.recorder.slices(vector, self.layout.trainable),
            )
        )
        return reduction.Node(0, shard, vector, loss, weight)

    def guard(
        self, leaf: reduction.Node, worker: Worker, step: int, shard: int, ids: sharding.Ids
    ) -> trace.Halt | None:
        """Return a Halt that names the place of a non-finite value in `leaf`.

        The result is None if all are finite.
        """
        place = engine.non_finite(leaf.vector)
        if place is None and math.isfinite(leaf.loss):
            return None
        tensor, element = self.layout.locate(place) if place is not None else (None, None)
        what = f"gradient {tensor}[{element}]" if tensor else f"loss {leaf.loss}"
        return trace.Halt(
            step=step,
            reason=f"non-finite {what} on worker {worker.rank}, step {step}, shard {shard}: "
            "training halted before any update",
            rank=worker.rank,
            shard=shard,
            tensor=tensor,
            ids=tuple(ids),
        )

    def clipped(self, gradient: Any, device: DeviceOptimizer | None = None) -> Clipped:
        """Return an averaged `gradient`, float32 [num_trainable], clipped for the next step.

        If a `device` is given, `gradient` must be on it.
        """
        of: Any = optimizer if device is None else device
        norm = of.norm_l2(gradient)
        clipped = of.clip(gradient, norm, self.plan.clip_norm)
        result = Clipped(
            gradient=clipped,
            norm=norm,
            rate=self.rate(),
            norm_of=of.norm_l2,
            is_as_before=clipped is gradient,
        )
        if device is not None:
            _ = result.applied_norm  # now: later the device would compute the next shard first
        return result

    def averaged(
        self, mean: Array, loss: float, weight: float, clipped: Clipped | None = None
    ) -> Average:
        """Return the Average that every worker's step needs; `mean` is the averaged vector.

        `loss` is the batch's summed loss, not yet divided by the batch's `weight`. Without
        `clipped`, the gradient is clipped here, on the host.
        """
        gradient = mean[: self.layout.num_trainable]
        return Average(
            mean=mean,
            loss=loss / weight,
            weight=weight,
            clipped=clipped or self.clipped(gradient),
            recorded=lambda: self.recorder.slices(gradient, self.layout.trainable),
        )

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return optimizer.learning_rate(
            self.schedule_step,
            peak=self.plan.learning_rate,
            kind=self.plan.schedule,
            warmup_steps=self.plan.warmup_steps,
            num_steps=self.plan.num_steps,
        )

    def move(self, worker: Worker, clipped: Clipped, mean: Array) -> None:
        """Update one worker's replica; the gradient was clipped where the worker takes steps.

        Running means of buffers move towards those in `mean`, the averaged vector.
        """
        replica, gradient = worker.replica, clipped.gradient
        if worker.on_device is not None:
            worker.on_device.step(gradient, clipped.rate)
        else:
            optimizer.step(self.rule, replica.parameters, gradient, worker.state, clipped.rate)
            replica.changed()
        replica.average_buffers(mean)

    def update(self, worker: Worker, step: int, average: Average) -> trace.Update:
        """Return the event that records the step that `move` took with `average`."""
        worker.settle()
        replica = worker.replica
        return trace.Update(
            step=step,
            rank=worker.rank,
            loss=average.loss,
            weight=average.weight,
            learning_rate=average.clipped.rate,
            rates={},
            finite=engine.non_finite(replica.parameters) is None,
            gradient=average.record,
            grad_norm=average.clipped.norm,
            applied_norm=average.clipped.applied_norm,
            **self.state(worker),
        )

    def apply(self, step: int, total: reduction.Node) -> None:
        """Average and clip `total` once.

        Update every worker's replica with it and record the steps.
        """
        mean = optimizer.mean(total.vector, total.weight * self.scale)
        average = self.averaged(mean, total.loss, total.weight)
        for worker in self.workers.values():
            self.move(worker, average.clipped, mean)
            self.recorder.emit(self.update(worker, step, average))

    def inject(
        self, vector: Array, loss: float, worker: Worker, step: int, shard: int, count: int
    ) -> float:
        for fault in self.faults:
            if fault.kind not in PLANTED or fault.step != step:
                continue
            if fault.shard not in (None, shard):
                continue
            if fault.rank not in (None, worker.rank):
                continue
            assert fault.value is not None, "faults.NEEDED has it"
            value, tensor = float(fault.value), None
            if fault.kind == "non_finite_loss":
                loss = value
            else:
                tensor, element = models.place_of(fault, self.workload)
                times = count * self.scale if fault.kind == "huge_gradient" else 1.0
                vector[self.layout.trainable[tensor].start + element] = value * times
            named = None if fault.tensor else tensor
            self.record_fault(fault, step, worker.rank, shard, tensor=named)
        return loss

    def new_worker(
        self, rank: int, tensors: Mapping[str, Array], moments: Mapping[str, Array] | None = None
    ) -> Worker:
        """Return a worker with copies of `tensors` and of `moments`, which are zeros by default."""
        backend = self.backend_of(rank)
        replica = engine.Engine(self.workload, backend, tensors, scale=self.scale)
        state = optimizer.initial_state(self.plan.optimizer, self.layout.num_trainable)
        if moments is not None:  # in the order of `state`
            state = {name: moments[name].copy() for name in state}
        return Worker(rank, replica, state)

    def go_to(self, progress: Mapping[str, Any]) -> None:
        """Set position and schedule to the values in `progress`."""
        self.position = sharding.Position(progress["epoch"], progress["offset"])
        self.schedule_step = progress["schedule_step"]

    @property
    def stands(self) -> checkpoint.Progress:
        """The current position in the data and in the schedule."""
        return checkpoint.Progress(position=self.position, schedule_step=self.schedule_step)

    def dump(self, worker: Worker) -> Buffer:
        """Return a worker's whole state as bytes: progress, tensors and moments."""
        specs, kind = self.layout.specs, workers.optimizer_of_workers(self.plan)
        return checkpoint.dump_state(specs, kind, self.stands, worker.replica.arrays, worker.state)

    def take_over(self, rank: int, payload: Buffer) -> Worker:
        """Return worker `rank` with the state in `payload`, which also sets this run's progress.

        Raises ProtocolError if the state does not fit this run.
        """
        specs, kind = self.workload.specs, workers.optimizer_of_workers(self.plan)
        self.require_progress(payload)
        progress, tensors, moments = checkpoint.load_state(specs, kind, payload)
        self.position, self.schedule_step = progress.position, progress.schedule_step
        worker = self.new_worker(rank, tensors)
        worker.state = moments
        worker.move_to_device(self.rule)
        return worker

    def require_progress(self, payload: Buffer) -> None:
        """Raise ProtocolError if the position in `payload` is past the last sample."""
        position = checkpoint.progress_of(payload).position
        if position.offset >= self.plan.num_samples:
            raise ProtocolError(f"a state at {position}: no sample has that offset")

    def require_sum(self, message: TreeNode | Partial) -> None:
        """Raise ProtocolError if `message` has an impossible weight or a non-finite loss."""
        weight, loss = message.weight, message.loss
        most = self.workload.weight_max * self.plan.batch_size
        if not (0 <= weight <= most and math.isfinite(loss)):
            raise ProtocolError(
                f"{type(message).__name__} {weight=} {loss=}: "
                f"use 0 to {most}, and a finite loss (NonFinite reports others)"
            )

    def _order(self, epoch: int) -> sharding.Ids:
        if self._visit is None or self._visit[0] != epoch:
            rng = self.plan.rng("order", epoch)
            self._visit = epoch, sharding.order(self.plan.num_samples, rng)
        return self._visit[1]

    def progress(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "schedule_step": self.schedule_step,
            "epoch": self.position.epoch,
            "offset": self.position.offset,
        }

    def state(self, worker: Worker) -> dict[str, Any]:
        """Return records of a worker's weights, optimizer state and buffers."""
        return {
            "weights": self.recorder.tensors(worker.replica.weights),
            "optimizer": self.recorder.tensors(worker.state),
            "buffers": self.recorder.tensors(worker.replica.buffers),
        }

    def record_start(self, worker: Worker, step: int, resumed: bool = False) -> None:
        specs = self.workload.specs
        self.recorder.emit(
            trace.Start(
                step=step,
                rank=worker.rank,
                trainable=tuple(spec.name for spec in specs if spec.role == "trainable"),
                frozen=tuple(spec.name for spec in specs if spec.role == "frozen"),
                decayed=tuple(spec.name for spec in specs if spec.decayed),
                progress=self.progress(step),
                resumed=resumed,
                **self.state(worker),
            )
        )

    def record_fault(
        self,
        fault: Fault,
        step: int,
        rank: int | None = None,
        shard: int | None = None,
        tensor: str | None = None,
    ) -> None:
        rank = fault.rank if rank is None else rank
        self.recorder.emit(
            trace.Injected(fault=fault.to_dict(), step=step, rank=rank, shard=shard, tensor=tensor)
        )
