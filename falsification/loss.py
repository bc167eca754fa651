"""Bugs in the number by which a loss is divided."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from entrenar_py.shared import trace
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems.textbook import Setup
from entrenar_py.train.arithmetic import decoder, reduction, sharding
from entrenar_py.train.coordinator import replicas

from .subjects import REPLICAS, TEXTBOOK, TRAINING, reference, textbook

_compute = replicas.Replicas.compute


def mean_of_means(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Averages the means of all ranks and micro-batches with equal weights."""
    parts = setup.scenario.world_size * setup.scenario.accumulation
    (loss / (setup.model.weight(ids) * parts)).backward()  # type: ignore[no-untyped-call]


def sum_of_means(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Adds the means of all micro-batches."""
    (loss / setup.model.weight(ids)).backward()  # type: ignore[no-untyped-call]


def sum_of_samples(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Divides by nothing."""
    loss.backward()  # type: ignore[no-untyped-call]


def by_batch_size(loss: Tensor, weight: float, setup: Setup, ids: sharding.Ids) -> None:
    """Divides by the nominal batch size, not by the actual one."""
    (loss / setup.scenario.batch_size).backward()  # type: ignore[no-untyped-call]


def shard_mean(
    self: replicas.Replicas, worker: replicas.Worker, step: int, shard: int, ids: sharding.Ids
) -> reduction.Node:
    """Sends the shard's mean with weight 1 in place of its sum with its weight."""
    leaf = _compute(self, worker, step, shard, ids)
    return reduction.Node(0, shard, leaf.vector / leaf.weight, leaf.loss / leaf.weight, 1.0)


def mean_of_shard_losses(shards: Sequence[trace.Shard], weight: float) -> float:
    """Reports the mean of the ranks' mean losses."""
    return sum((shard.loss_sum or 0.0) / shard.weight for shard in shards) / len(shards)


def of_rank_0(shards: Sequence[trace.Shard], weight: float) -> float:
    """Reports the loss of rank 0."""
    own = [shard for shard in shards if shard.rank == 0]
    return sum(shard.loss_sum or 0.0 for shard in own) / sum(shard.weight for shard in own)


def with_padding(self: decoder.ByteDecoder, ids: Sequence[int]) -> int:
    """Counts the positions of the padded rows, not the targets."""
    return decoder.POSITIONS * len(ids)


VARIANTS = (
    Variant(
        name="ga-mean",
        summary="gradient accumulation averages the token means of the micro-batches",
        source="transformers #34191",
        plants={f"{TEXTBOOK}.backward": mean_of_means},
        scenario=textbook(workload="decoder", world_size=1, accumulation=2, num_steps=2),
        invariants=("F-TI-001", "F-DP-005"),
        # LoRA's B starts at zero. So A's gradient is zero, and B's is the first that can be wrong.
        place={"step": 0, "rank": 0, "tensor": "blocks.0.attention.q.lora_b"},
    ),
    Variant(
        name="dp-mean",
        summary="ranks with unequal shards average their means",
        source="pytorch DistributedDataParallel, averaging as documented",
        plants={f"{TEXTBOOK}.backward": mean_of_means},
        scenario=textbook(world_size=3),
        invariants=("F-TI-001", "F-DP-005"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="shard-mean",
        summary="workers send the mean of a shard instead of its sum and weight",
        source="classic",
        plants={f"{REPLICAS}.Replicas.compute": shard_mean},
        scenario=reference(num_steps=2),
        invariants=("F-TI-001",),
        place={"step": 0, "rank": 0, "expected": "8.0", "got": "5.0"},
    ),
    Variant(
        name="ga-noscale",
        summary="the accumulated loss is not divided by the number of micro-batches",
        source="nanoGPT 553f949f",
        plants={f"{TEXTBOOK}.backward": sum_of_means},
        scenario=textbook(world_size=1, accumulation=4),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="sum-not-mean",
        summary="gradients are summed over the batch and never divided",
        source="classic",
        plants={f"{TEXTBOOK}.backward": sum_of_samples},
        scenario=textbook(),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fixed-divisor",
        summary="the short last batch of an epoch is divided by the full batch size",
        source="classic",
        plants={f"{TEXTBOOK}.backward": by_batch_size},
        scenario=textbook(),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 2, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="loss-mean-of-means",
        summary="the reported loss is the mean of the ranks' means",
        source="transformers #34191",
        plants={f"{TEXTBOOK}.reported_loss": mean_of_shard_losses},
        scenario=textbook(world_size=3),
        invariants=("F-TI-001",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="loss-of-rank-0",
        summary="the reported loss is rank 0's own",
        source="classic",
        plants={f"{TEXTBOOK}.reported_loss": of_rank_0},
        scenario=textbook(),
        invariants=("F-TI-001",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="padding-counted",
        summary="padded positions count as tokens in the mean",
        source="transformers #24725",
        plants={f"{TRAINING}.decoder.ByteDecoder.weight": with_padding},
        scenario=reference(workload="decoder", num_steps=2),
        invariants=("F-TI-001", "F-DP-005"),
        place={"step": 0, "rank": 0},
    ),
)
