"""Costs of a strategy: bytes that a worker needs on its device, and bytes that a step sends.

Persistent bytes are counted from the tensors. The bytes of a micro-batch come from its rehearsal
(see `shape.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.arithmetic.on_device import BYTES_MAX
from entrenar_py.train.arithmetic.reduction import num_nodes
from entrenar_py.train.plan.shape import FLOAT_BYTES, WHOLE, Counts, Cut, Rehearsal, Shape

# Memory in use before any tensor exists: on a CPU the interpreter with torch and transformers, on
# a GPU the context and the workspaces of its libraries. The CPU's value is measured, the others
# are estimates.
RUNTIME_BYTES = {"cpu": 450 * 10**6, "cuda": 700 * 10**6, "wgpu": 200 * 10**6}
MOMENTS = 2  # of AdamW, in float32
# Vectors, each as long as all trained tensors, that an update of the reference trainer holds:
# the average, its squares in float64, and AdamW's temporaries.
_UPDATE_VECTORS = 5
# The same for a worker that takes its steps on a GPU: the uploaded average, its squares in float64
# twice, the clipped gradient, roots in float64, and three temporaries of AdamW.
_DEVICE_UPDATE_VECTORS = 11
_TORCH_UPDATE_VECTORS = 2  # the same for torch.optim.AdamW, which updates all tensors together


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one worker's device. Each part is at its largest, which need not be at the peak.

    `peak` doesn't include `runtime`, which is in use before the first tensor exists.
    """

    weights: int
    trained: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    runtime: int

    @property
    def needed(self) -> int:
        """The peak plus the memory in use before the first tensor exists."""
        return self.peak + self.runtime


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of one worker: `shards` micro-batches a step, each of `rows` x `length` tokens.

    The run has `num_workers` workers. `kind` is the kind of the worker's device: cpu, cuda or wgpu.
    With `recompute`, the backward pass recomputes blocks.
    """

    rows: int
    length: int
    shards: int
    num_workers: int
    kind: str
    recompute: bool


def memory_of(strategy: str, shape: Shape, load: Load) -> Memory:
    """Return the memory of the worker that needs the most."""
    return _STRATEGIES[strategy][0](shape, load)


def coordinator_bytes(counts: Counts) -> int:
    """Return the bytes that a run's coordinator needs: the model, and the state of its replica."""
    vectors = 1 + MOMENTS + _UPDATE_VECTORS
    return counts.weight_bytes + vectors * FLOAT_BYTES * counts.trained + RUNTIME_BYTES["cpu"]


def _rehearsed(shape: Shape, load: Load, cut: Cut = WHOLE) -> Rehearsal:
    return shape.rehearsed(
        rows=load.rows, length=load.length, kind=load.kind, recompute=load.recompute, cut=cut
    )


def _protocol(shape: Shape, load: Load) -> Memory:
    """Return the memory of a worker in a star or mesh: the reference trainer's replica.

    A replica holds the gradient of each shard.
    """
    counts, step = shape.counts(), _rehearsed(shape, load)
    vector = FLOAT_BYTES * counts.trained
    on_host = load.kind == "cpu"
    on_device = load.kind == "cuda" and vector <= BYTES_MAX
    optimizer = MOMENTS * vector if on_host or on_device else 0
    # A GPU computes a shard while the gradient of the last one is copied to the host.
    gradients = (load.shards + 1 if on_host else 3 if on_device else 1) * vector
    base = counts.frozen_bytes + 2 * vector + optimizer  # the module's own tensors, and a replica's
    computing = step.peak + gradients
    updating = gradients + _UPDATE_VECTORS * vector if on_host else 0
    if on_device:  # recorded operations keep their memory
        computing += _DEVICE_UPDATE_VECTORS * vector
    return Memory(
        weights=counts.frozen_bytes,
        trained=2 * vector,
        gradients=gradients + vector,
        optimizer=optimizer,
        activations=step.kept,
        peak=base + max(computing, updating),
        runtime=RUNTIME_BYTES[load.kind],
    )


def _ddp(shape: Shape, load: Load, *, nodes: int = 0) -> Memory:
    """Return the memory of a rank of `ddp`, which also holds `nodes` more gradients.

    A small gradient is a vector: the sum, a shard's gradient, and its parts. A large one has views
    of the buckets of DistributedDataParallel.
    """
    counts, step = shape.counts(), _rehearsed(shape, load)
    vector = FLOAT_BYTES * counts.trained
    is_small = vector <= BYTES_MAX
    gradients = ((3 if is_small else 1) + nodes) * vector
    base = counts.weight_bytes + MOMENTS * vector + gradients
    updating = (_DEVICE_UPDATE_VECTORS if is_small else _TORCH_UPDATE_VECTORS) * vector
    keeps = is_small and load.kind == "cuda"  # recorded operations keep their memory
    peak = step.peak + updating if keeps else max(step.peak, updating)
    return Memory(
        weights=counts.frozen_bytes,
        trained=vector,
        gradients=gradients,
        optimizer=MOMENTS * vector,
        activations=step.kept,
        peak=base + peak,
        runtime=RUNTIME_BYTES[load.kind],
    )


def _ddp_canonical(shape: Shape, load: Load) -> Memory:
    """Return the memory of `_ddp` plus the nodes of the tree.

    There is one node for each power of two up to the number of a rank's shards.
    """
    return _ddp(shape, load, nodes=load.shards.bit_length())


def _fsdp(shape: Shape, load: Load) -> Memory:
    """Return the memory of a rank of fully_shard by block: its pieces, and what it gathers.

    Until the last of its micro-batches, a rank keeps its whole gradient.
    """
    counts, step = shape.counts(), _rehearsed(shape, load)
    size = load.num_workers
    vector = FLOAT_BYTES * counts.trained
    piece = -(-vector // size)
    gathered = counts.outside_bytes + 2 * counts.largest_block_bytes  # one computes, one arrives
    base = -(-counts.weight_bytes // size) + MOMENTS * piece
    computing = gathered + piece + step.peak + (vector if load.shards > 1 else 0)
    return Memory(
        weights=-(-counts.frozen_bytes // size) + gathered,
        trained=piece,
        gradients=vector + piece,
        optimizer=MOMENTS * piece,
        activations=step.kept,
        peak=base + max(computing, (1 + _TORCH_UPDATE_VECTORS) * piece),
        runtime=RUNTIME_BYTES[load.kind],
    )


def _fsdp_canonical(shape: Shape, load: Load) -> Memory:
    """Return the memory of `_fsdp` plus the gradients that wait for others of their size.

    They are whole, or pieces if the number of ranks isn't a power of two.
    """
    memory, size = _fsdp(shape, load), load.num_workers
    vector = FLOAT_BYTES * shape.counts().trained
    waiting = vector * max(load.shards.bit_length() - 2, 0)
    if size & (size - 1):
        waiting = -(-vector // size) * (load.shards * size).bit_length()
    return replace(memory, gradients=memory.gradients + waiting, peak=memory.peak + waiting)


def _tensor_parallel(shape: Shape, load: Load) -> Memory:
    """Return the memory of a rank with its part of each layer, from a rehearsal of that part."""
    cut = Cut(tensor=load.num_workers)
    memory = _part(shape, load, cut, _rehearsed(shape, load, cut))
    vector = FLOAT_BYTES * shape.counts(cut).trained
    if vector > BYTES_MAX:
        return memory
    parts = 2 * vector  # a shard's gradient, and its parts, as in `_ddp`
    peak = memory.peak + parts + _DEVICE_UPDATE_VECTORS * vector
    return replace(memory, gradients=memory.gradients + parts, peak=peak)


def _sequence_parallel(shape: Shape, load: Load) -> Memory:
    """Return the memory of a rank of sequence parallelism, which also cuts tensors between layers.

    Plain tensor parallelism divides a part s of the activations by the number of ranks n, and
    leaves a part r whole. So the whole model keeps s + r, and a rank of plain tensor parallelism
    keeps s / n + r.
    """
    size, cut = load.num_workers, Cut(tensor=load.num_workers)
    whole, shared = _rehearsed(shape, load), _rehearsed(shape, load, cut)
    spared = shared.kept - -(-whole.kept // size)
    return _part(shape, load, cut, Rehearsal(kept=shared.kept - spared, peak=shared.peak - spared))


def _pipeline_parallel(shape: Shape, load: Load) -> Memory:
    """Return the memory of the fullest rank that has a stage of blocks, with the schedule 1F1B.

    The first stage holds one micro-batch for each stage, the last stage holds one. Only the last
    stage computes the loss.
    """
    size = load.num_workers
    num_blocks = -(-shape.num_blocks // size)
    end = Cut(blocks=num_blocks, has_table=size == 1)
    last = _part(shape, load, end, _rehearsed(shape, load, replace(end, has_table=True)))
    start = Cut(blocks=num_blocks, has_head=size == 1)
    # A block's activations are a difference: a model without blocks may have nothing to train.
    two = _rehearsed(shape, load, Cut(blocks=min(2, shape.num_blocks)))
    one = _rehearsed(shape, load, Cut(blocks=1))
    kept = (two.kept - one.kept if shape.num_blocks > 1 else one.kept) * num_blocks
    kept *= min(size, load.shards)
    block = _rehearsed(shape, load, Cut(blocks=1, has_head=size == 1))
    step = Rehearsal(kept=kept, peak=kept + block.peak - block.kept)
    return max(_part(shape, load, start, step), last, key=lambda stage: stage.peak)


def _part(shape: Shape, load: Load, cut: Cut, step: Rehearsal) -> Memory:
    counts = shape.counts(cut)
    vector = FLOAT_BYTES * counts.trained
    return Memory(
        weights=counts.frozen_bytes,
        trained=vector,
        gradients=vector,
        optimizer=MOMENTS * vector,
        activations=step.kept,
        peak=counts.weight_bytes
        + MOMENTS * vector
        + max(step.peak + vector, (1 + _TORCH_UPDATE_VECTORS) * vector),
        runtime=RUNTIME_BYTES[load.kind],
    )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step: what a worker sends and receives, and what the busiest link carries.

    The busiest link is a worker's own, or the coordinator's. `busiest` counts one direction, or the
    sum of both if one direction can only follow the other.
    """

    sent: int
    received: int
    busiest: int

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds of the transfers at `bandwidth` bytes per second, without overlap."""
        return self.busiest / bandwidth


NOTHING = Traffic(sent=0, received=0, busiest=0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step of `num_workers` workers: `num_shards` micro-batches of `rows` x `length` tokens.

    `product_bytes` is the size of an element of a matrix product.
    """

    rows: int
    length: int
    num_shards: int
    num_workers: int
    product_bytes: int
    recompute: bool


def traffic_of(strategy: str, shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of the worker with the most, without message headers."""
    if batch.num_workers == 1 and strategy != "star":
        return NOTHING
    return _STRATEGIES[strategy][1](shape, batch)


def nodes_of(batch: Batch) -> list[int]:
    """Return how many sums each worker of a star sends, after adding shards along the tree."""
    runs = sharding.runs(range(batch.num_shards), range(batch.num_workers))
    return [num_nodes(run[0], run[-1] + 1) if len(run) else 0 for run in runs.values()]


def _gradient(shape: Shape) -> int:
    return FLOAT_BYTES * shape.counts().trained


def _star(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of a star: sums go to the coordinator, the average goes to all."""
    vector, nodes = _gradient(shape), nodes_of(batch)
    return Traffic(
        sent=max(nodes) * vector,
        received=vector,
        busiest=(sum(nodes) + batch.num_workers) * vector,
    )


def _mesh(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of a mesh: sums go to the owner of each part, averages go to everyone."""
    vector, nodes, size = _gradient(shape), nodes_of(batch), batch.num_workers
    others = vector * (size - 1) // size
    sent = max(nodes) * others + others
    received = max(sum(nodes) - least for least in nodes) * vector // size + others
    return Traffic(sent=sent, received=received, busiest=max(sent, received))


def _all_reduce(num_bytes: int, size: int) -> Traffic:
    """Return the traffic of a ring: a reduce-scatter and an all-gather."""
    sent = 2 * num_bytes * (size - 1) // size
    return Traffic(sent=sent, received=sent, busiest=sent)


def _ddp_moves(shape: Shape, batch: Batch) -> Traffic:
    return _all_reduce(_gradient(shape), batch.num_workers)


def _fsdp_moves(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of FSDP, which reduces gradients once."""
    return _gathered(shape, batch, num_gradients=1)


def _fsdp_canonical_moves(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of FSDP that also gathers the sum for its norm.

    If the number of ranks isn't a power of two, each micro-batch's gradient is exchanged.
    """
    size = batch.num_workers
    exchanges = -(-batch.num_shards // size) if size & (size - 1) else 1
    return _gathered(shape, batch, num_gradients=exchanges + 1)


def _gathered(shape: Shape, batch: Batch, *, num_gradients: int) -> Traffic:
    """Return the traffic of `num_gradients` gradients, and of weights.

    Weights are gathered for the forward and the backward pass of each micro-batch.
    """
    counts, size = shape.counts(), batch.num_workers
    micro_batches = -(-batch.num_shards // size)
    weights = 2 * counts.weight_bytes * micro_batches
    sent = (weights + num_gradients * _gradient(shape)) * (size - 1) // size
    return Traffic(sent=sent, received=sent, busiest=sent)


def _hidden(shape: Shape, batch: Batch) -> int:
    hidden_size: int = shape.config.hidden_size
    return batch.rows * batch.length * hidden_size * batch.product_bytes


def _tensor_parallel_moves(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of all-reduces of activations.

    Each pass through a block has two, after attention and after the MLP.
    """
    passes = 3 if batch.recompute else 2
    num_bytes = 2 * passes * shape.num_blocks * batch.num_shards * _hidden(shape, batch)
    return _all_reduce(num_bytes, batch.num_workers)


def _pipeline_parallel_moves(shape: Shape, batch: Batch) -> Traffic:
    """Return the traffic of a stage: hidden states out and gradients in, for each micro-batch."""
    one_way = batch.num_shards * _hidden(shape, batch)
    both = (2 if batch.num_workers > 2 else 1) * one_way
    return Traffic(sent=both, received=both, busiest=both)


# How the memory and the traffic of each strategy are estimated.
_STRATEGIES: Mapping[
    str, tuple[Callable[[Shape, Load], Memory], Callable[[Shape, Batch], Traffic]]
] = {
    "star": (_protocol, _star),
    "mesh": (_protocol, _mesh),
    "ddp": (_ddp, _ddp_moves),
    "ddp_canonical": (_ddp_canonical, _ddp_moves),
    "fsdp": (_fsdp, _fsdp_moves),
    "fsdp_canonical": (_fsdp_canonical, _fsdp_canonical_moves),
    "tensor_parallel": (_tensor_parallel, _tensor_parallel_moves),
    # A reduce-scatter and an all-gather for each all-reduce.
    "sequence_parallel": (_sequence_parallel, _tensor_parallel_moves),
    "pipeline_parallel": (_pipeline_parallel, _pipeline_parallel_moves),
}
STRATEGIES = tuple(_STRATEGIES)
