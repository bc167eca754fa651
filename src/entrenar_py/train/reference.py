"""The reference trainer: a deterministic data-parallel trainer with all its workers in one process.

It is the oracle for every other system. In a step each worker computes its logical shards and folds
them along the tree. The sums are added, divided and clipped once, and every worker updates its own
replica. If a shard's loss or gradient is not finite, training halts before the update.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from entrenar_py.shared import trace, workers
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import checkpoint, reduction, sharding
from entrenar_py.train.coordinator.replicas import Replicas, Worker


class Trainer(Replicas):
    """One run with every worker in this process."""

    def __init__(
        self, plan: TrainingPlan, *, faults: Sequence[Fault] = (), stops: Sequence[int] = ()
    ) -> None:
        super().__init__(plan, faults=faults)
        self._stops = stops
        initial = self.initial()
        ranks = workers.initial_ranks(plan.world_size, faults)
        self.workers = {rank: self.new_worker(rank, initial) for rank in ranks}

    def train(self) -> str:
        """Run all steps; return `completed`, or `halted` if a non-finite value stopped training."""
        for worker in self.workers.values():
            self.record_start(worker, step=0)
        for step in range(self.plan.num_steps):
            if step in self._stops:
                self._stop_and_resume(step)
            for fault in self._faults("join", step):
                self._join(fault, step)
            if not self.step(step):
                return "halted"
        return "completed"

    # --- one step -----------------------------------------------------------------------------

    def step(self, step: int) -> bool:
        """Apply `step`, the next one; if a value is not finite, record a Halt and return False."""
        ids = self.batch()
        shards = sharding.cut(ids, self.plan.num_shards)
        nodes: list[reduction.Node] = []
        halt: trace.Halt | None = None
        for worker, run in self._assignments(step):
            leaves = []
            for shard in run:
                leaf = self.compute(worker, step, shard, shards[shard])
                halt = halt or self.guard(leaf, worker, step, shard, shards[shard])
                leaves.append(leaf)
            if halt is None:
                nodes += reduction.fold(leaves, self.plan.num_shards)
        if halt is not None:
            self.recorder.emit(halt)
            return False
        total = reduction.root(nodes, self.plan.num_shards)
        self.apply(step, total)
        self.advance(len(ids))
        return True

    def _assignments(self, step: int) -> Iterator[tuple[Worker, Sequence[int]]]:
        """Yield each worker with its shards.

        If a worker dies, the remaining workers get its shards.
        """
        run_of = sharding.runs(range(self.plan.num_shards), list(self.workers))
        for fault in self._faults("leave", step):
            orphaned = run_of.pop(self._leave(fault, step))
            yield from self._pairs(sharding.runs(orphaned, list(self.workers)))
        yield from self._pairs(run_of)

    def _pairs(self, run_of: dict[int, Sequence[int]]) -> Iterator[tuple[Worker, Sequence[int]]]:
        return ((self.workers[rank], run) for rank, run in run_of.items())

    # --- membership, faults, checkpoints --------------------------------------------------------

    def _leave(self, fault: Fault, step: int) -> int:
        rank = self._rank_of(fault)
        del self.workers[rank]
        self.record_fault(fault, step)
        self.recorder.emit(
            trace.Membership(step=step, rank=rank, change="left", reason="died while computing")
        )
        return rank

    def _join(self, fault: Fault, step: int) -> None:
        rank = self._rank_of(fault)
        donor = next(iter(self.workers.values()))
        worker = self.new_worker(rank, donor.replica.arrays, donor.state)
        self.workers = dict(sorted({**self.workers, rank: worker}.items()))
        self.record_fault(fault, step)
        self.recorder.emit(trace.Membership(step=step, rank=rank, change="joined"))
        self.record_start(worker, step)

    def _stop_and_resume(self, step: int) -> None:
        """Write a checkpoint, drop every worker, and start again from the file."""
        first = next(iter(self.workers.values()))
        progress = self.progress(step)
        self.recorder.emit(
            trace.Saved(step=step, rank=first.rank, progress=progress, **self.state(first))
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint")
            checkpoint.save(path, first.checkpoint, progress)
            ranks, self.workers = list(self.workers), {}
            arrays, progress = checkpoint.load(path)
        for rank in ranks:
            groups = (checkpoint.group_of(arrays, name) for name in ("tensors", "optimizer"))
            self.workers[rank] = self.new_worker(rank, *groups)
        self.go_to(progress)
        for worker in self.workers.values():
            self.record_start(worker, step, resumed=True)

    # --- helpers --------------------------------------------------------------------------------

    def _faults(self, kind: str, step: int) -> list[Fault]:
        return [f for f in self.faults if f.kind == kind and f.step == step]

    def _rank_of(self, fault: Fault) -> int:
        assert fault.rank is not None, "faults.NEEDED has it"
        return fault.rank
