"""Bytes that a worker of a strategy needs on its device, foreseen from shapes alone.

Persistent bytes are counted by tensors. Those of a micro-batch come from its rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from entrenar_py.train.plan.shape import FLOAT_BYTES, WHOLE, Counts, Cut, Rehearsal, Shape

# What is there before any tensor: an interpreter with torch and transformers; on a GPU the context
# and the workspaces of its libraries. The CPU's is measured, the others are estimates.
RUNTIME_BYTES = {"cpu": 450 * 10**6, "cuda": 700 * 10**6, "wgpu": 200 * 10**6}
MOMENTS = 2  # AdamW's, float32
# Vectors of the trained tensors' length that an update of the reference trainer takes at once:
# the average, its squares in float64, and AdamW's temporaries.
_UPDATE_VECTORS = 5
_TORCH_UPDATE_VECTORS = 2  # of torch.optim.AdamW, for all tensors together


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one worker's device, each part at its largest; parts need not coincide at the peak.

    `runtime` is not in the peak: it is there before the first tensor.
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
        """The peak, and what is there before the first tensor."""
        return self.peak + self.runtime


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a worker computes: micro-batches of `rows` x `length` tokens, `shards` of them a step.

    `num_workers` share the run; `kind` is that of the device.
    """

    rows: int
    length: int
    shards: int
    num_workers: int
    kind: str
    recompute: bool


def of(strategy: str, shape: Shape, load: Load) -> Memory:
    """Return the memory of the worker that needs most."""
    return _STRATEGIES[strategy](shape, load)


def coordinator_bytes(counts: Counts) -> int:
    """Return what the coordinator of a run takes: the model, and the state of its own replica."""
    vectors = 1 + MOMENTS + _UPDATE_VECTORS
    return counts.weight_bytes + vectors * FLOAT_BYTES * counts.trained + RUNTIME_BYTES["cpu"]


def _rehearsed(shape: Shape, load: Load, cut: Cut = WHOLE) -> Rehearsal:
    return shape.rehearsed(
        rows=load.rows, length=load.length, kind=load.kind, recompute=load.recompute, cut=cut
    )


def _protocol(shape: Shape, load: Load) -> Memory:
    """Star and mesh: the reference trainer's replica, which holds each shard's gradient."""
    counts, step = shape.counts(), _rehearsed(shape, load)
    vector = FLOAT_BYTES * counts.trained
    on_host = load.kind == "cpu"
    optimizer = MOMENTS * vector if on_host else 0
    gradients = (load.shards + 1) * vector if on_host else vector
    base = counts.frozen_bytes + 2 * vector + optimizer  # the module's own tensors, and a replica's
    computing = step.peak + gradients
    updating = gradients + _UPDATE_VECTORS * vector if on_host else 0
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
    """DistributedDataParallel: gradients are views of its buckets. `nodes` more are held."""
    counts, step = shape.counts(), _rehearsed(shape, load)
    vector = FLOAT_BYTES * counts.trained
    gradients = (1 + nodes) * vector
    base = counts.weight_bytes + MOMENTS * vector + gradients
    return Memory(
        weights=counts.frozen_bytes,
        trained=vector,
        gradients=gradients,
        optimizer=MOMENTS * vector,
        activations=step.kept,
        peak=base + max(step.peak, _TORCH_UPDATE_VECTORS * vector),
        runtime=RUNTIME_BYTES[load.kind],
    )


def _ddp_canonical(shape: Shape, load: Load) -> Memory:
    """As DDP, with the nodes of the tree: one for each power of two of a rank's shards."""
    return _ddp(shape, load, nodes=load.shards.bit_length())


def _fsdp(shape: Shape, load: Load) -> Memory:
    """fully_shard by block: pieces of all tensors, and what is gathered while it computes.

    Until the last of its micro-batches a rank keeps its whole gradient.
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


def _tensor_parallel(shape: Shape, load: Load) -> Memory:
    """Layers shared by all ranks: the step of one rank's part is rehearsed."""
    cut = Cut(tensor=load.num_workers)
    return _part(shape, load, cut, _rehearsed(shape, load, cut))


def _sequence_parallel(shape: Shape, load: Load) -> Memory:
    """As tensor parallelism, where what is outside of the shared layers is shared, too.

    Of activations a part s is divided by the number of ranks anyway, and a part r is not: the whole
    model keeps s + r, a rank of tensor parallelism s / n + r.
    """
    size, cut = load.num_workers, Cut(tensor=load.num_workers)
    whole, shared = _rehearsed(shape, load), _rehearsed(shape, load, cut)
    spared = shared.kept - -(-whole.kept // size)
    return _part(shape, load, cut, Rehearsal(kept=shared.kept - spared, peak=shared.peak - spared))


def _pipeline_parallel(shape: Shape, load: Load) -> Memory:
    """Blocks in stages, 1F1B: the first stage holds a micro-batch for each stage, the last one.

    Only the last computes the loss.
    """
    size = load.num_workers
    num_blocks = -(-shape.num_blocks // size)
    end = Cut(blocks=num_blocks, has_table=size == 1)
    last = _part(shape, load, end, _rehearsed(shape, load, replace(end, has_table=True)))
    start = Cut(blocks=num_blocks, has_head=size == 1)
    # What a block keeps, as a difference: a model without blocks may have nothing to train.
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


_STRATEGIES: Mapping[str, Callable[[Shape, Load], Memory]] = {
    "star": _protocol,
    "mesh": _protocol,
    "ddp": _ddp,
    "ddp_canonical": _ddp_canonical,
    "fsdp": _fsdp,
    "tensor_parallel": _tensor_parallel,
    "sequence_parallel": _sequence_parallel,
    "pipeline_parallel": _pipeline_parallel,
}
STRATEGIES = tuple(_STRATEGIES)
