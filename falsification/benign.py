"""Correct variants of the trainers in one process: no check may report any of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train import reference as coordinator
from entrenar_py.train.arithmetic import engine, reduction, sharding, workload
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, LinearFunction

from .subjects import REFERENCE, TEXTBOOK, TRAINING, reference, textbook

_micro_step, _build_optimizer = trainer.micro_step, trainer.build_optimizer
_fold, _root, _shard = reduction.fold, reduction.root, engine.Engine.shard
_sum_ranks, _loss_of = trainer.sum_ranks, workload.DigitClassifier.loss_of

# (rank, micro-batch) -> name -> gradient, kept by `keep_each` for `reduce_each`.
_each: dict[tuple[int, int], dict[str, Tensor]] = {}


def keep_each(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Keeps every micro-batch's gradient separately, for `reduce_each`."""
    replica.optimizer.zero_grad()
    shard = _micro_step(setup, replica, step, epoch, micro, ids, weight)
    _each[replica.rank, micro] = {
        name: trainer.gradient_of(replica, name).clone() for name in setup.trainable
    }
    return shard


def reduce_each(setup: Setup, replicas: list[Replica]) -> None:
    """Sums each micro-batch over ranks, then adds these sums."""
    for name in setup.trainable:
        sums = [
            _sum_ranks([_each[replica.rank, micro][name] for replica in replicas])
            for micro in range(setup.scenario.accumulation)
        ]
        for replica in replicas:
            replica.tensors[name].grad = torch.stack(sums).sum(0)


def reduce_buckets(setup: Setup, replicas: list[Replica]) -> None:
    """Reduces buckets of 100 elements, last tensor first; gradients are views of one buffer."""
    names = setup.trainable[::-1]
    flat = [
        torch.cat([trainer.gradient_of(r, name).reshape(-1) for name in names]) for r in replicas
    ]
    buckets = zip(*(torch.split(vector, 100) for vector in flat), strict=True)
    total = torch.cat([_sum_ranks(list(bucket)) for bucket in buckets])
    for replica in replicas:
        own, start = total.clone(), 0
        for name in names:
            shape = replica.tensors[name].shape
            replica.tensors[name].grad = own[start : start + shape.numel()].view(shape)
            start += shape.numel()


def reversed_ranks(gradients: list[Tensor]) -> Tensor:
    """Sums over ranks, last rank first."""
    return _sum_ranks(gradients[::-1])


def foreach(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Uses the multi-tensor implementation of the optimizer."""
    return _implementation(_build_optimizer(setup, tensors), "foreach")


def fused(setup: Setup, tensors: dict[str, Tensor]) -> torch.optim.Optimizer:
    """Uses the fused implementation of the optimizer."""
    return _implementation(_build_optimizer(setup, tensors), "fused")


def _implementation(built: torch.optim.Optimizer, flag: str) -> torch.optim.Optimizer:
    for group in built.param_groups:
        group[flag] = True
    return built


def zero_in_place(replica: Replica) -> None:
    """Fills gradients with zeros instead of dropping them."""
    replica.optimizer.zero_grad(set_to_none=False)


def evaluate_then_schedule(setup: Setup, replica: Replica) -> None:
    """Evaluates on the whole data set between two steps."""
    with torch.no_grad():
        setup.model.loss_of(
            replica.tensors,
            setup.model.batch(range(setup.scenario.num_samples)),
            linear=torch.nn.functional.linear,
            drop=engine.no_dropout,
        )
    replica.scheduler.step()


def strided(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Gives each rank every num_ranks-th sample of the batch."""
    return ids[index::num_ranks]


def lopsided(ids: sharding.Ids, index: int, num_ranks: int) -> sharding.Ids:
    """Gives every rank one sample, and the last rank all remaining ones."""
    start, end = index, index + 1 if index < num_ranks - 1 else len(ids)
    return ids[start:end]


def rank_mean_times_weight(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Back-propagates the mean of the micro-batch, weighted by its share of the batch."""
    own = setup.model.weight(ids)
    (loss / own * (own / weight)).backward()  # type: ignore[no-untyped-call]


def in_one_batch(
    self: engine.Engine, ids: sharding.Ids, *, accumulation: int, drop: DropFunction
) -> tuple[Array, float, float]:
    """Computes the shard at once, although the scenario has micro-batches."""
    return _shard(self, ids, accumulation=1, drop=drop)


def twice(
    self: engine.Engine, ids: sharding.Ids, *, accumulation: int, drop: DropFunction
) -> tuple[Array, float, float]:
    """Computes every shard twice and keeps the second result."""
    _shard(self, ids, accumulation=accumulation, drop=drop)
    return _shard(self, ids, accumulation=accumulation, drop=drop)


def from_the_last(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
    """Adds nodes that arrive in reversed order."""
    return _root(reversed(list(nodes)), num_shards)


def unfolded(nodes: Iterable[reduction.Node], num_shards: int) -> list[reduction.Node]:
    """Sends a worker's leaves one by one, without folding them."""
    return list(nodes)


def fold_at_the_root(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
    """Folds all nodes at the coordinator."""
    (total,) = _fold(nodes, num_shards)
    return total


def recomputed(
    self: workload.DigitClassifier,
    tensors: Mapping[str, Tensor],
    batch: Sequence[Tensor],
    *,
    linear: LinearFunction,
    drop: DropFunction,
) -> Tensor:
    """Activation checkpointing: the forward pass is computed again during the backward pass."""
    loss: Tensor = checkpoint(
        lambda held: _loss_of(self, held, batch, linear=linear, drop=drop),
        tensors,
        use_reentrant=False,
    )
    return loss


def unshuffled(num_samples: int, rng: np.random.Generator) -> sharding.Ids:
    """Keeps the data in its stored order in every epoch."""
    return range(num_samples)


def rolled_back(self: coordinator.Trainer) -> str:
    """Crashes after step 3, goes back to the checkpoint before step 2, and makes both again."""
    for worker in self.workers.values():
        self.record_start(worker, step=0)
    for step in (0, 1):
        self.step(step)
    first, progress = self.workers[0], self.progress(2)
    self.recorder.emit(trace.Saved(step=2, rank=0, progress=progress, **self.state(first)))
    tensors, state = deepcopy((first.replica.arrays, first.state))
    position, schedule_step = self.position, self.schedule_step
    for step in (2, 3):
        self.step(step)
    self.position, self.schedule_step = position, schedule_step
    for rank in self.workers:
        self.workers[rank] = self.new_worker(rank, tensors)
        self.workers[rank].state = deepcopy(state)
        self.record_start(self.workers[rank], 2, resumed=True)
    for step in range(2, self.plan.num_steps):
        self.step(step)
    return "completed"


# The clauses that every correct trainer keeps, and those of trainers that promise bits.
_ANY = ("F-DP-001", "F-DP-002", "F-DP-003", "F-DP-005", "F-TI-001", "F-TI-004", "F-TI-008")
_BITS = ("F-TI-006", "F-TI-007")

VARIANTS = (
    Variant(
        name="sync-each-micro-batch",
        summary="gradients are reduced after every micro-batch",
        plants={f"{TEXTBOOK}.micro_step": keep_each, f"{TEXTBOOK}.all_reduce": reduce_each},
        scenario=textbook(accumulation=4),
        tried=_ANY,
    ),
    Variant(
        name="buckets",
        summary="gradients are reduced in buckets, last first, and are views of one buffer",
        plants={f"{TEXTBOOK}.all_reduce": reduce_buckets},
        scenario=textbook(world_size=3, clip_norm=0.05),
        tried=_ANY,
    ),
    Variant(
        name="reversed-ranks",
        summary="ranks are added from the last to the first",
        plants={f"{TEXTBOOK}.sum_ranks": reversed_ranks},
        scenario=textbook(world_size=5, optimizer="momentum"),
        tried=_ANY,
    ),
    Variant(
        name="more-ranks-than-samples",
        summary="eight ranks share batches of five, so that some have nothing to do",
        plants={},
        scenario=textbook(world_size=8, num_shards=8, num_samples=18, batch_size=5),
        tried=_ANY,
    ),
    Variant(
        name="foreach-optimizer",
        summary="the multi-tensor implementation of AdamW",
        plants={f"{TEXTBOOK}.build_optimizer": foreach},
        scenario=textbook(optimizer="adamw", learning_rate=0.01, weight_decay=0.1),
        tried=_ANY,
    ),
    Variant(
        name="fused-optimizer",
        summary="the fused implementation of SGD with momentum",
        plants={f"{TEXTBOOK}.build_optimizer": fused},
        scenario=textbook(optimizer="momentum", weight_decay=0.1),
        tried=_ANY,
    ),
    Variant(
        name="zero-in-place",
        summary="gradients are filled with zeros instead of set to None",
        plants={f"{TEXTBOOK}.zero_grad": zero_in_place},
        scenario=textbook(accumulation=2, stops=(2,)),
        tried=(*_ANY, "F-TI-002", "F-TI-003"),
    ),
    Variant(
        name="evaluation-between",
        summary="the whole data set is evaluated between two steps",
        plants={f"{TEXTBOOK}.scheduler_step": evaluate_then_schedule},
        scenario=textbook(schedule="cosine", dropout=0.2),
        tried=("F-DP-001", "F-DP-002", "F-DP-003", "F-TI-004", "F-TI-005", "F-TI-008"),
    ),
    Variant(
        name="strided-sharding",
        summary="ranks take every n-th sample of the batch",
        plants={f"{TEXTBOOK}.local_batch": strided},
        scenario=textbook(world_size=3),
        tried=_ANY,
    ),
    Variant(
        name="lopsided-sharding",
        summary="ranks take one sample each and the last one the rest, properly weighted",
        plants={f"{TEXTBOOK}.local_batch": lopsided},
        scenario=textbook(world_size=3, workload="decoder", num_samples=14, batch_size=7),
        tried=("F-DP-001", "F-DP-002", "F-DP-003", "F-DP-005", "F-TI-001", "F-TI-008"),
    ),
    Variant(
        name="mean-times-weight",
        summary="every micro-batch's mean is weighted by its share of the batch",
        plants={f"{TEXTBOOK}.backward": rank_mean_times_weight},
        scenario=textbook(world_size=3, accumulation=2),
        tried=_ANY,
    ),
    Variant(
        name="one-large-batch",
        summary="a shard is computed at once although micro-batches are configured",
        plants={f"{TRAINING}.engine.Engine.shard": in_one_batch},
        scenario=reference(accumulation=2),
        tried=(*_ANY, *_BITS),
    ),
    Variant(
        name="shard-computed-twice",
        summary="every shard is computed twice and the second result used",
        plants={f"{TRAINING}.engine.Engine.shard": twice},
        scenario=reference(clip_norm=0.05),
        tried=(*_ANY, *_BITS),
    ),
    Variant(
        name="nodes-from-the-last",
        summary="partial sums arrive in reversed order",
        plants={f"{TRAINING}.reduction.root": from_the_last},
        scenario=reference(faults=(Fault(kind="leave", rank=1, step=1),)),
        tried=(*_BITS, "F-DP-001", "F-DP-002", "F-DP-005", "F-DP-006"),
    ),
    Variant(
        name="leaves-unfolded",
        summary="workers send their leaves one by one",
        plants={
            f"{TRAINING}.reduction.fold": unfolded,
            f"{TRAINING}.reduction.root": fold_at_the_root,
        },
        scenario=reference(optimizer="adamw", learning_rate=0.01, dropout=0.2),
        tried=(*_BITS, "F-DP-001", "F-DP-002", "F-TI-004", "F-TI-005", "F-TI-008"),
    ),
    Variant(
        name="activation-checkpointing",
        summary="the forward pass is computed again during the backward pass",
        plants={f"{TRAINING}.workload.DigitClassifier.loss_of": recomputed},
        scenario=textbook(accumulation=2),
        tried=_ANY,
    ),
    Variant(
        name="adapter-at-rest",
        summary="LoRA's A has no gradient while B is zero",
        plants={},
        scenario=reference(workload="decoder", num_steps=4, learning_rate=0.5),
        tried=(*_ANY, *_BITS),
    ),
    Variant(
        name="unshuffled",
        summary="every epoch visits the data in its own order",
        plants={f"{TRAINING}.sharding.order": unshuffled},
        # With one batch an epoch, the single device, which shuffles, has the same sums.
        scenario=reference(batch_size=21, num_steps=7),
        tried=(*_ANY, *_BITS, "F-TI-005"),
    ),
    Variant(
        name="resumed-twice",
        summary="a run that is stopped in the middle of an epoch, and again a step later",
        plants={},
        scenario=reference(
            num_steps=6, stops=(4, 5), optimizer="momentum", schedule="cosine", dropout=0.2
        ),
        tried=("F-DP-001", "F-DP-002", "F-TI-002", "F-TI-003", "F-TI-005", "F-TI-008"),
    ),
    Variant(
        name="rolled-back",
        summary="a run that crashes, returns to an older checkpoint and repeats two steps",
        plants={f"{REFERENCE}.Trainer.train": rolled_back},
        scenario=reference(num_steps=6, optimizer="momentum", dropout=0.2),
        tried=("F-DP-001", "F-DP-002", "F-DP-003", "F-TI-002", "F-TI-004", "F-TI-005", *_BITS),
    ),
    Variant(
        name="halted-on-nan",
        summary="a NaN stops the run at once, so only a few steps can be judged",
        plants={},
        scenario=reference(
            faults=(Fault(kind="non_finite_gradient", step=2, rank=1, shard=2, value="nan"),)
        ),
        tried=("F-DP-001", "F-DP-003", "F-TI-008"),
    ),
)
