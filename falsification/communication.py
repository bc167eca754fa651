"""Bugs in the reduction of gradients: which are reduced, in which order and precision."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems import textbook as trainer
from entrenar_py.systems.textbook import Replica, Setup
from entrenar_py.train.arithmetic import engine, reduction, sharding
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.coordinator import replicas

from .subjects import REPLICAS, TEXTBOOK, TRAINING, reference, textbook

_all_reduce, _apply, _micro_step = trainer.all_reduce, trainer.apply, trainer.micro_step
_inject, _add = replicas.Replicas.inject, reduction.add

# rank -> name -> gradient of earlier micro-batches, for `earlier_stay_local`
_earlier: dict[int, dict[str, Tensor]] = {}


def nothing_reduced(setup: Setup, replicas: list[Replica]) -> None:
    """Reduces no gradient."""


def one_layer_left_out(setup: Setup, replicas: list[Replica]) -> None:
    """Reduces all gradients but those of the second layer."""
    names = ("hidden2.weight", "hidden2.bias")
    local = [{name: trainer.gradient_of(r, name).clone() for name in names} for r in replicas]
    _all_reduce(setup, replicas)
    for replica, kept in zip(replicas, local, strict=True):
        for name, gradient in kept.items():
            replica.tensors[name].grad = gradient


def last_micro_batch_alone(
    setup: Setup,
    replica: Replica,
    step: int,
    epoch: int,
    micro: int,
    ids: sharding.Ids,
    weight: float,
) -> trace.Shard:
    """Sets the gradients of earlier micro-batches aside, for `earlier_stay_local`."""
    if micro == setup.scenario.accumulation - 1:
        _earlier[replica.rank] = {
            name: trainer.gradient_of(replica, name).clone() for name in setup.trainable
        }
        replica.optimizer.zero_grad()
    return _micro_step(setup, replica, step, epoch, micro, ids, weight)


def earlier_stay_local(setup: Setup, replicas: list[Replica]) -> None:
    """Reduces only the last micro-batch's gradient; each rank adds its own earlier ones to it."""
    _all_reduce(setup, replicas)
    for replica in replicas:
        for name, gradient in _earlier[replica.rank].items():
            trainer.gradient_of(replica, name).add_(gradient)


def odd_tail_summed(setup: Setup, replicas: list[Replica]) -> None:
    """Averages all elements but the last of an odd number, which stays the sum over ranks."""
    _all_reduce(setup, replicas)
    for replica in replicas:
        for name in setup.trainable:
            flat = trainer.gradient_of(replica, name).view(-1)
            if flat.numel() % 2:
                flat[-1] *= len(replicas)


def without_the_last(gradients: list[Tensor]) -> Tensor:
    """Sums over ranks before the last rank's gradient has arrived."""
    return torch.stack(gradients[:-1]).sum(0)


def in_bfloat16(gradients: list[Tensor]) -> Tensor:
    """Sums over ranks with 8 bits of mantissa."""
    return reduce(torch.add, [gradient.bfloat16() for gradient in gradients]).float()


def local_buffers(setup: Setup, replicas: list[Replica], ids: sharding.Ids) -> None:
    """Moves each rank's running means towards the mean of its own samples."""
    for index, replica in enumerate(replicas):
        own = trainer.local_batch(ids, index, len(replicas))
        for name, total in setup.model.statistics(own).items():
            mean = torch.from_numpy(total) / len(own)
            replica.tensors[name].lerp_(mean, engine.BUFFER_MOMENTUM)


def mean_of_local_means(setup: Setup, replicas: list[Replica], ids: sharding.Ids) -> None:
    """Gives the mean of every rank the same weight."""
    parts = sharding.cut(ids, len(replicas))
    means = [
        {name: total / len(part) for name, total in setup.model.statistics(part).items()}
        for part in parts
    ]
    for replica in replicas:
        for name in setup.buffers:
            mean = torch.from_numpy(sum(local[name] for local in means) / len(means))
            replica.tensors[name].lerp_(mean, engine.BUFFER_MOMENTUM)


def flipped_before(
    self: replicas.Replicas,
    vector: Array,
    loss: float,
    worker: replicas.Worker,
    step: int,
    shard: int,
    count: int,
) -> float:
    """Flips the top mantissa bit of one element of worker 1's shard 2 in step 1."""
    if (worker.rank, step, shard) == (1, 1, 2):
        vector[2:3].view(np.uint32)[0] ^= 1 << 22
    return _inject(self, vector, loss, worker, step, shard, count)


def flipped_after(setup: Setup, replica: Replica, step: int, loss: float, weight: float) -> None:
    """Flips one bit in rank 1's copy of the reduced gradient in step 1."""
    if (replica.rank, step) == (1, 1):
        gradient = trainer.gradient_of(replica, "hidden2.weight").view(-1)
        gradient[5:6].numpy().view(np.uint32)[0] ^= 1 << 22
    _apply(setup, replica, step, loss, weight)


def folded_in_rank_order(nodes: Iterable[reduction.Node], num_shards: int) -> list[reduction.Node]:
    """Adds all leaves of a worker one after the other."""
    return [reduce(_plus, nodes)]


def summed_as_they_come(nodes: Iterable[reduction.Node], num_shards: int) -> reduction.Node:
    """Adds all nodes that came one after the other."""
    return reduce(_plus, nodes)


def _plus(one: reduction.Node, other: reduction.Node) -> reduction.Node:
    return reduction.Node(
        0, 0, one.vector + other.vector, one.loss + other.loss, one.weight + other.weight
    )


def no_scale(weight_max: int) -> float:
    """Carries sums without a scale."""
    return 1.0


def overflowing_add(node: reduction.Node, sibling: reduction.Node) -> reduction.Node:
    """Adds two siblings, and ignores an overflow."""
    with np.errstate(over="ignore"):
        return _add(node, sibling)


VARIANTS = (
    Variant(
        name="ddp-bypass",
        summary="the loss is computed on the unwrapped module, so nothing is reduced",
        source="minimind #853, Lightning #17424",
        plants={f"{TEXTBOOK}.all_reduce": nothing_reduced},
        scenario=textbook(),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="regather-ckpt",
        summary="the checkpointed layer's second backward pass leaves its gradients local",
        source="pytorch #109191",
        plants={f"{TEXTBOOK}.all_reduce": one_layer_left_out},
        scenario=textbook(),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden2.weight"},
    ),
    Variant(
        name="hook-preacc",
        summary="the reduction hook sees the last micro-batch; earlier ones stay local",
        source="picotron d0efdcc",
        plants={
            f"{TEXTBOOK}.micro_step": last_micro_batch_alone,
            f"{TEXTBOOK}.all_reduce": earlier_stay_local,
        },
        scenario=textbook(accumulation=2),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="late-rank-left-out",
        summary="the sum is read before the last rank's gradient has arrived",
        source="classic (missing synchronisation)",
        plants={f"{TEXTBOOK}.sum_ranks": without_the_last},
        scenario=textbook(world_size=3),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="avg-tail",
        summary="the vectorised average leaves the odd last element of a tensor as a sum",
        source="Horovod #2375",
        plants={f"{TEXTBOOK}.all_reduce": odd_tail_summed},
        scenario=textbook(world_size=3, width=7),
        invariants=("F-DP-005",),
        # 64 x 7 weights are even, 7 biases are odd: the last of them is the first tail.
        place={"step": 0, "rank": 0, "tensor": "hidden1.bias", "element": 6},
    ),
    Variant(
        name="reduce-bfloat16",
        summary="gradients are added over ranks in bfloat16",
        source="classic (communication dtype)",
        plants={f"{TEXTBOOK}.sum_ranks": in_bfloat16},
        scenario=textbook(),
        invariants=("F-DP-005",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="buffer-unsynced",
        summary="running means follow each rank's own samples",
        source="classic (batch-norm statistics)",
        plants={f"{TEXTBOOK}.update_buffers": local_buffers},
        scenario=textbook(),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "running_mean"},
    ),
    Variant(
        name="buffer-mean-of-means",
        summary="running means average the ranks' means without the sizes of their shards",
        source="classic (batch-norm statistics)",
        plants={f"{TEXTBOOK}.update_buffers": mean_of_local_means},
        scenario=textbook(batch_size=5),
        invariants=("F-DP-005",),
        place={"step": 0, "rank": 0, "tensor": "running_mean"},
    ),
    Variant(
        name="sdc-flip-before",
        summary="one bit of worker 1's gradient flips before the reduction",
        source="Llama 3 report; Ma et al. arXiv 2502.12340",
        plants={f"{REPLICAS}.Replicas.inject": flipped_before},
        scenario=reference(),
        invariants=("F-TI-006",),
        place={"step": 1, "rank": 1, "shard": 2, "tensor": "hidden1.weight", "element": 2},
    ),
    Variant(
        name="sdc-flip-after",
        summary="one bit of rank 1's copy flips after the reduction",
        source="Llama 3 report; Ma et al. arXiv 2502.12340",
        plants={f"{TEXTBOOK}.apply": flipped_after},
        scenario=textbook(world_size=3),
        invariants=("F-DP-001",),
        place={"step": 1, "rank": 1, "tensor": "hidden2.weight", "element": 5},
    ),
    Variant(
        name="arrival-order",
        summary="gradients are added worker by worker instead of along the tree",
        source="classic (parameter server)",
        plants={
            f"{TRAINING}.reduction.fold": folded_in_rank_order,
            f"{TRAINING}.reduction.root": summed_as_they_come,
        },
        scenario=reference(num_samples=40, batch_size=40, num_shards=8),
        invariants=("F-TI-006", "F-DP-005"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="sum-overflows",
        summary="gradients near the largest float are summed unscaled and overflow",
        source="classic (fp16 summation)",
        plants={
            f"{TRAINING}.engine.scale_of": no_scale,
            f"{TRAINING}.reduction.add": overflowing_add,
        },
        scenario=reference(faults=(Fault(kind="huge_gradient", step=1, element=0, value="1e38"),)),
        invariants=("F-DP-003",),
        place={"step": 1, "rank": 0},
    ),
)
