"""Bugs when a worker leaves or joins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from weakref import WeakKeyDictionary

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train import reference as trainer
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator import replicas

from .subjects import REFERENCE, TRAINING, reference, visit

_leave, _assignments = trainer.Trainer._leave, trainer.Trainer._assignments

# run -> the worker that `not_quite_dead` gave up
_given_up: WeakKeyDictionary[trainer.Trainer, replicas.Worker] = WeakKeyDictionary()


def without_orphans(
    self: trainer.Trainer, step: int
) -> Iterator[tuple[replicas.Worker, Sequence[int]]]:
    """Does not reassign the shards of a dead worker."""
    run_of = sharding.runs(range(self.plan.num_shards), list(self.workers))
    for fault in self._faults("leave", step):
        del run_of[self._leave(fault, step)]
    yield from self._pairs(run_of)


def of_what_came(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
    """Adds the nodes that came, even if some are missing."""
    return reduce(
        lambda one, other: reduction.Node(
            0, 0, one.vector + other.vector, one.loss + other.loss, one.weight + other.weight
        ),
        nodes,
    )


def counted_by_ranks(self: trainer.Trainer, fault: Fault, step: int) -> int:
    """Stores the position as steps per rank, and reads it with the new number of ranks."""
    per_rank = self.position.offset // len(self.workers)
    rank = _leave(self, fault, step)
    self.position = sharding.Position(self.position.epoch, per_rank * len(self.workers))
    return rank


def not_quite_dead(self: trainer.Trainer, fault: Fault, step: int) -> int:
    """Gives up a worker that is still alive, for `ghost_computes`."""
    assert fault.rank is not None
    _given_up[self] = self.workers[fault.rank]
    return _leave(self, fault, step)


def ghost_computes(
    self: trainer.Trainer, step: int
) -> Iterator[tuple[replicas.Worker, Sequence[int]]]:
    """Uses the result of a worker given up in an earlier step as that of another worker."""
    ghost = _given_up.get(self)
    for worker, run in _assignments(self, step):
        yield ghost or worker, run
        ghost = None


def join_with(
    self: trainer.Trainer, fault: Fault, step: int, weights: dict[str, Array] | None
) -> None:
    """Join with `weights` (the donor's if None) and a new optimizer state."""
    assert fault.rank is not None
    donor = next(iter(self.workers.values()))
    worker = self.new_worker(fault.rank, weights or donor.replica.arrays)
    self.workers = dict(sorted({**self.workers, fault.rank: worker}.items()))
    self.record_fault(fault, step)
    self.recorder.emit(trace.Membership(step=step, rank=fault.rank, change="joined"))
    self.record_start(worker, step)


def join_without_moments(self: trainer.Trainer, fault: Fault, step: int) -> None:
    """Gives a joining worker only the weights."""
    join_with(self, fault, step, None)


def join_afresh(self: trainer.Trainer, fault: Fault, step: int) -> None:
    """Starts a joining worker from the initial weights."""
    join_with(self, fault, step, self.workload.initial(self.plan.rng("initial")))


_LEAVE = Fault(kind="leave", rank=1, step=1)
_LEAVING = reference(faults=(_LEAVE,), num_steps=6)
_JOINING = _LEAVING.with_(faults=(_LEAVE, Fault(kind="join", rank=1, step=3)), optimizer="momentum")

VARIANTS = (
    Variant(
        name="shard-lost",
        summary="the shards of a dead worker are missing from its last step",
        source="Horovod #3144",
        plants={
            f"{REFERENCE}.Trainer._assignments": without_orphans,
            f"{TRAINING}.reduction.root": of_what_came,
        },
        scenario=_LEAVING,
        invariants=("F-DP-006",),
        # Step 1 is samples 8-15 of the order; worker 1 has shards 2 and 3, the 5th to 7th of them.
        place={"step": 1, "rank": 1, "sample_ids": tuple(sorted(visit(_LEAVING)[12:15]))},
    ),
    Variant(
        name="elastic-sampler",
        summary="the position is kept per rank and misread when the number of ranks changes",
        source="Horovod #3144",
        plants={f"{REFERENCE}.Trainer._leave": counted_by_ranks},
        scenario=_LEAVING,
        invariants=("F-DP-006",),
        # Offset 8 on 3 workers is 2 each, 4 on 2 workers: step 2 draws 12-19 in place of 16-20.
        place={
            "step": 2,
            "rank": 1,
            "sample_ids": tuple(sorted([*visit(_LEAVING)[12:16], visit(_LEAVING)[20]])),
        },
    ),
    Variant(
        name="ghost-computes",
        summary="a worker declared dead is alive, and its results from old weights are used",
        source="classic (late gradients)",
        plants={
            f"{REFERENCE}.Trainer._leave": not_quite_dead,
            f"{REFERENCE}.Trainer._assignments": ghost_computes,
        },
        scenario=_LEAVING,
        invariants=("F-DP-002",),
        # Step 2 is what is left, samples 16-20, one a shard; the first run is shards 0 to 2.
        place={"step": 2, "rank": 1, "shard": 0, "sample_ids": (visit(_LEAVING)[16],)},
    ),
    Variant(
        name="join-without-moments",
        summary="a worker that joins gets the weights but not the optimizer state",
        source="classic (elastic training)",
        plants={f"{REFERENCE}.Trainer._join": join_without_moments},
        scenario=_JOINING,
        invariants=("F-DP-001",),
        place={"step": 2, "rank": 1, "tensor": "momentum"},
    ),
    Variant(
        name="join-afresh",
        summary="a worker that joins starts from the initial weights",
        source="classic (elastic training)",
        plants={f"{REFERENCE}.Trainer._join": join_afresh},
        scenario=_JOINING,
        invariants=("F-DP-001",),
        place={"step": 2, "rank": 1, "tensor": "hidden1.weight"},
    ),
)
