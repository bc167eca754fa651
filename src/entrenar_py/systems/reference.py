"""The reference trainer: a deterministic data-parallel trainer with all its workers in one process.

The oracle of every other system. One step: each worker computes its logical shards and folds them
along the tree; the coordinator adds the folded nodes, divides and clips once, and stops everyone if
a shard is not finite; every worker steps its own replica.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py import trace
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.systems import membership, models
from entrenar_py.systems.devices import Devices
from entrenar_py.systems.recorder import Recorder
from entrenar_py.training import (
    checkpoint,
    dropout,
    engine,
    layout,
    optimizer,
    reduction,
    schedule,
    sharding,
)
from entrenar_py.training.tensors import Array


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says; it promises the same bits where all compute on one backend."""
    trainer = Trainer(scenario)
    status = trainer.train()
    promises = ("bitwise",) if trainer.devices.alike else ()
    return trainer.recorder.finish(promises=promises, status=status)


@dataclass
class Worker:
    """One worker: its replica and its optimizer state."""

    rank: int
    replica: engine.Engine
    state: optimizer.State


class Trainer:
    """One run: the workers, the position in the data, and what is recorded of them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.recorder = Recorder(scenario)
        self.devices = Devices(scenario, self.recorder)
        self.workload = models.model_of(scenario)
        self.layout = layout.Layout(self.workload.specs)
        self.rule = optimizer.Rule(scenario.optimizer, scenario.weight_decay, self.layout.decayed)
        self.scale = engine.scale_of(self.workload.weight_max * scenario.batch_size)
        self.position = sharding.Position()
        self.schedule_step = 0
        self._visit: tuple[int, sharding.Ids] | None = None
        initial = self.workload.initial(scenario.rng("initial"))
        ranks = membership.initial_ranks(scenario)
        self.workers = {rank: self._worker(rank, initial) for rank in ranks}

    def train(self) -> str:
        """Runs all steps; `completed`, or `halted` if a non-finite value stopped it."""
        for worker in self.workers.values():
            self._record_start(worker, step=0)
        for step in range(self.scenario.num_steps):
            if step in self.scenario.stops:
                self._stop_and_resume(step)
            for fault in self._faults("join", step):
                self._join(fault, step)
            if not self._step(step):
                return "halted"
        return "completed"

    # --- one step -----------------------------------------------------------------------------

    def _step(self, step: int) -> bool:
        ids = sharding.batch(self._order(), self.position, self.scenario.batch_size)
        shards = sharding.cut(ids, self.scenario.num_shards)
        nodes: list[reduction.Node] = []
        halt: trace.Halt | None = None
        for worker, run in self._assignments(step):
            leaves = []
            for shard in run:
                leaf = self._compute(worker, step, shard, shards[shard])
                halt = halt or self._guard(leaf, worker, step, shard, shards[shard])
                leaves.append(leaf)
            if halt is None:
                nodes += reduction.fold(leaves, self.scenario.num_shards)
        if halt is not None:
            self.recorder.emit(halt)
            return False
        total = reduction.root(nodes, self.scenario.num_shards)
        self._apply(step, total)
        self.position = sharding.advance(self.position, len(ids), self.scenario.num_samples)
        self.schedule_step += 1
        return True

    def _assignments(self, step: int) -> Iterator[tuple[Worker, Sequence[int]]]:
        """Who computes which shards of this step; a worker that dies in it hands its run on."""
        run_of = sharding.runs(range(self.scenario.num_shards), list(self.workers))
        for fault in self._faults("leave", step):
            orphaned = run_of.pop(self._leave(fault, step))
            yield from self._pairs(sharding.runs(orphaned, list(self.workers)))
        yield from self._pairs(run_of)

    def _pairs(self, run_of: dict[int, Sequence[int]]) -> Iterator[tuple[Worker, Sequence[int]]]:
        return ((self.workers[rank], run) for rank, run in run_of.items())

    def _compute(self, worker: Worker, step: int, shard: int, ids: sharding.Ids) -> reduction.Node:
        rate = self.scenario.dropout
        drop = dropout.Dropout(rate, self.scenario.rng("dropout", step, shard)) if rate else None
        vector, loss, weight = worker.replica.shard(
            ids,
            accumulation=self.scenario.accumulation,
            drop=drop or dropout.none,
        )
        loss = self._inject(vector, loss, worker, step, shard, len(ids))
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

    def _guard(
        self, leaf: reduction.Node, worker: Worker, step: int, shard: int, ids: sharding.Ids
    ) -> trace.Halt | None:
        """The halt that a non-finite leaf demands, naming the culprit; None if it is finite."""
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

    def _apply(self, step: int, total: reduction.Node) -> None:
        """Every worker steps its own replica with the one gradient, averaged and clipped once."""
        scenario = self.scenario
        average = optimizer.mean(total.vector, total.weight * self.scale)
        rate = schedule.learning_rate(
            self.schedule_step,
            peak=scenario.learning_rate,
            kind=scenario.schedule,
            warmup_steps=scenario.warmup_steps,
            num_steps=scenario.num_steps,
        )
        gradient = average[: self.layout.num_trainable]
        record = self.recorder.slices(gradient, self.layout.trainable)
        norm = optimizer.norm_l2(gradient)
        clipped = optimizer.clip(gradient, norm, scenario.clip_norm)
        applied_norm = norm if clipped is gradient else optimizer.norm_l2(clipped)
        for worker in self.workers.values():
            replica = worker.replica
            optimizer.step(self.rule, replica.parameters, clipped, worker.state, rate)
            replica.average_buffers(average)
            self.recorder.emit(
                trace.Update(
                    step=step,
                    rank=worker.rank,
                    loss=total.loss / total.weight,
                    weight=total.weight,
                    learning_rate=rate,
                    finite=engine.non_finite(replica.parameters) is None,
                    gradient=record,
                    grad_norm=norm,
                    applied_norm=applied_norm,
                    **self._state(worker),
                )
            )

    # --- membership, faults, checkpoints --------------------------------------------------------

    def _leave(self, fault: Fault, step: int) -> int:
        rank = self._rank_of(fault)
        del self.workers[rank]
        self._record_fault(fault, step)
        self.recorder.emit(
            trace.Membership(step=step, rank=rank, change="left", reason="died while computing")
        )
        return rank

    def _join(self, fault: Fault, step: int) -> None:
        rank = self._rank_of(fault)
        donor = next(iter(self.workers.values()))
        worker = self._worker(rank, donor.replica.arrays)
        worker.state = {name: vector.copy() for name, vector in donor.state.items()}
        self.workers = dict(sorted({**self.workers, rank: worker}.items()))
        self._record_fault(fault, step)
        self.recorder.emit(trace.Membership(step=step, rank=rank, change="joined"))
        self._record_start(worker, step)

    def _inject(
        self, vector: Array, loss: float, worker: Worker, step: int, shard: int, count: int
    ) -> float:
        for fault in self.scenario.faults:
            if fault.value is None or fault.step != step or fault.shard not in (None, shard):
                continue
            if fault.rank not in (None, worker.rank):
                continue
            value = float(fault.value)
            if fault.kind == "non_finite_loss":
                loss = value
            else:
                tensor, element = models.place_of(fault, self.workload)
                times = count * self.scale if fault.kind == "huge_gradient" else 1.0
                vector[self.layout.trainable[tensor].start + element] = value * times
            self._record_fault(fault, step, worker.rank, shard)
        return loss

    def _stop_and_resume(self, step: int) -> None:
        """Writes a checkpoint, drops every worker, and starts again from the file."""
        first = next(iter(self.workers.values()))
        progress = self._progress(step)
        self.recorder.emit(
            trace.Saved(step=step, rank=first.rank, progress=progress, **self._state(first))
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint")
            checkpoint.save(
                path,
                checkpoint.as_arrays(tensors=first.replica.arrays, optimizer=first.state),
                progress,
            )
            ranks, self.workers = list(self.workers), {}
            arrays, progress = checkpoint.load(path)
        for rank in ranks:
            worker = self._worker(rank, checkpoint.group_of(arrays, "tensors"))
            saved = checkpoint.group_of(arrays, "optimizer")  # in no order; a trace has one
            worker.state = {name: saved[name].copy() for name in worker.state}
            self.workers[rank] = worker
        self.position = sharding.Position(progress["epoch"], progress["offset"])
        self.schedule_step = progress["schedule_step"]
        for worker in self.workers.values():
            self._record_start(worker, step, resumed=True)

    # --- small things ---------------------------------------------------------------------------

    def _worker(self, rank: int, tensors: Mapping[str, Array]) -> Worker:
        linear = self.devices.of(rank).linear
        replica = engine.Engine(self.workload, linear, tensors, scale=self.scale)
        state = optimizer.initial_state(self.scenario.optimizer, self.layout.num_trainable)
        return Worker(rank, replica, state)

    def _order(self) -> sharding.Ids:
        """The current epoch's order of the samples."""
        epoch = self.position.epoch
        if self._visit is None or self._visit[0] != epoch:
            rng = self.scenario.rng("order", epoch)
            self._visit = epoch, sharding.order(self.scenario.num_samples, rng)
        return self._visit[1]

    def _progress(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "schedule_step": self.schedule_step,
            "epoch": self.position.epoch,
            "offset": self.position.offset,
        }

    def _state(self, worker: Worker) -> dict[str, trace.Tensors]:
        """Weights, optimizer state and buffers of a worker, as records."""
        return {
            "weights": self.recorder.tensors(worker.replica.weights),
            "optimizer": self.recorder.tensors(worker.state),
            "buffers": self.recorder.tensors(worker.replica.buffers),
        }

    def _record_start(self, worker: Worker, step: int, resumed: bool = False) -> None:
        specs = self.workload.specs
        self.recorder.emit(
            trace.Start(
                step=step,
                rank=worker.rank,
                trainable=tuple(spec.name for spec in specs if spec.role == "trainable"),
                frozen=tuple(spec.name for spec in specs if spec.role == "frozen"),
                decayed=tuple(spec.name for spec in specs if spec.decayed),
                progress=self._progress(step),
                resumed=resumed,
                **self._state(worker),
            )
        )

    def _faults(self, kind: str, step: int) -> list[Fault]:
        return [f for f in self.scenario.faults if f.kind == kind and f.step == step]

    def _rank_of(self, fault: Fault) -> int:
        assert fault.rank is not None, "faults.NEEDED has it"
        return fault.rank

    def _record_fault(
        self, fault: Fault, step: int, rank: int | None = None, shard: int | None = None
    ) -> None:
        rank = fault.rank if rank is None else rank
        self.recorder.emit(trace.Injected(fault=fault.to_dict(), step=step, rank=rank, shard=shard))
