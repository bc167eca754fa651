"""Bytes on the wire in a step, by strategy, and the seconds they take at a bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.reduction import num_nodes
from entrenar_py.train.plan.shape import FLOAT_BYTES, Shape


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step: what a worker sends and receives, and what the busiest link carries.

    The busiest link is a worker's own, or the coordinator's. `busiest` counts one direction, or
    both where one can only follow the other.
    """

    sent: int
    received: int
    busiest: int

    def seconds(self, bandwidth: float) -> float:
        """Return the time of a step's transfers at `bandwidth` bytes a second, none overlapped."""
        return self.busiest / bandwidth


NOTHING = Traffic(sent=0, received=0, busiest=0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step: `num_shards` micro-batches of `rows` x `length` tokens, for `num_workers`."""

    rows: int
    length: int
    num_shards: int
    num_workers: int
    product_bytes: int
    recompute: bool


def of(strategy: str, shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of the worker that has most, without the headers of messages."""
    if batch.num_workers == 1 and strategy != "star":
        return NOTHING
    return _STRATEGIES[strategy](shape, batch)


def nodes_of(batch: Batch) -> list[int]:
    """Return how many sums each worker sends in a star: its shards, folded along the tree."""
    runs = sharding.runs(range(batch.num_shards), range(batch.num_workers))
    return [num_nodes(run[0], run[-1] + 1) if len(run) else 0 for run in runs.values()]


def _gradient(shape: Shape) -> int:
    return FLOAT_BYTES * shape.counts().trained


def _star(shape: Shape, batch: Batch) -> Traffic:
    """Sums go up to the coordinator, then the average comes down to every worker."""
    vector, nodes = _gradient(shape), nodes_of(batch)
    return Traffic(
        sent=max(nodes) * vector,
        received=vector,
        busiest=(sum(nodes) + batch.num_workers) * vector,
    )


def _mesh(shape: Shape, batch: Batch) -> Traffic:
    """Each worker averages its part of the vector: sums go to the owners, averages to all."""
    vector, nodes, size = _gradient(shape), nodes_of(batch), batch.num_workers
    others = vector * (size - 1) // size
    sent = max(nodes) * others + others
    received = max(sum(nodes) - least for least in nodes) * vector // size + others
    return Traffic(sent=sent, received=received, busiest=max(sent, received))


def _all_reduce(num_bytes: int, size: int) -> Traffic:
    """Return the traffic of a ring: a reduce-scatter, and an all-gather."""
    sent = 2 * num_bytes * (size - 1) // size
    return Traffic(sent=sent, received=sent, busiest=sent)


def _ddp(shape: Shape, batch: Batch) -> Traffic:
    return _all_reduce(_gradient(shape), batch.num_workers)


def _fsdp(shape: Shape, batch: Batch) -> Traffic:
    """Weights are gathered for each micro-batch, forward and backward; gradients meet once."""
    counts, size = shape.counts(), batch.num_workers
    micro_batches = -(-batch.num_shards // size)
    gathered = 2 * counts.weight_bytes * micro_batches
    sent = (gathered + _gradient(shape)) * (size - 1) // size
    return Traffic(sent=sent, received=sent, busiest=sent)


def _hidden(shape: Shape, batch: Batch) -> int:
    """Return the bytes of one micro-batch between two blocks."""
    hidden_size: int = shape.config.hidden_size
    return batch.rows * batch.length * hidden_size * batch.product_bytes


def _tensor_parallel(shape: Shape, batch: Batch) -> Traffic:
    """All-reduces of activations: after attention and after the MLP, and as many backward."""
    passes = 3 if batch.recompute else 2
    num_bytes = 2 * passes * shape.num_blocks * batch.num_shards * _hidden(shape, batch)
    return _all_reduce(num_bytes, batch.num_workers)


def _pipeline_parallel(shape: Shape, batch: Batch) -> Traffic:
    """A stage sends hidden states on and gets their gradients back, for each micro-batch."""
    one_way = batch.num_shards * _hidden(shape, batch)
    both = (2 if batch.num_workers > 2 else 1) * one_way
    return Traffic(sent=both, received=both, busiest=both)


_STRATEGIES: Mapping[str, Callable[[Shape, Batch], Traffic]] = {
    "star": _star,
    "mesh": _mesh,
    "ddp": _ddp,
    "ddp_canonical": _ddp,
    "fsdp": _fsdp,
    "tensor_parallel": _tensor_parallel,
    "sequence_parallel": _tensor_parallel,  # a reduce-scatter and an all-gather for each all-reduce
    "pipeline_parallel": _pipeline_parallel,
}
