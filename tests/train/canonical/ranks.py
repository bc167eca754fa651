"""Trains small models with canonical reductions on ranks forked from one process.

`python -m tests.train.canonical.ranks DEVICE VARIANT ...` trains each variant on each number of
ranks, and prints the digests of the final weights as JSON: {variant: {world size: [of each rank]}}.
DEVICE is `cpu`, over gloo, or `cuda`, over NCCL on all GPUs.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Loaded before the fork, as the first optimizer of every rank would load it after that.
import torch._dynamo.aot_compile
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import entrenar_py
from entrenar_py.train.canonical import exchange, reducer, sharded_reducer
from entrenar_py.train.canonical.sharded_reducer import ShardedReducer

WORLDS = (1, 2, 3, 4, 8)
MICRO_BATCHES = 8
# On GPUs, the work for a bucket is recorded as a graph when it repeats, which takes some steps.
NUM_STEPS = {"cpu": 2, "cuda": 6}


class Mixed(nn.Module):
    """A model with weights, and so buckets, of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).bfloat16())
        return out


def dense(dtype: torch.dtype) -> nn.Module:
    """Return a model whose sizes are not divisible by the world sizes."""
    return nn.Sequential(nn.Linear(5, 37), nn.Tanh(), nn.Linear(37, 3)).to(dtype)


def channels_last() -> nn.Module:
    """Return a model with a channels-last weight, whose elements aren't in C order."""
    layers = nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 6, 3, padding=1), nn.Flatten())
    layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(layers, nn.Linear(6, 3))


class Tied(nn.Module):
    """A model with one weight in two layers, a frozen layer, and a layer that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.recomputed = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.recomputed, self.first(x), use_reentrant=False)
        out: Tensor = self.last(self.frozen(hidden))
        return out


def long() -> nn.Module:
    """Return a model whose shards are long enough for loops over vectors, with odd remainders."""
    return nn.Sequential(nn.Linear(5, 203), nn.Tanh(), nn.Linear(203, 101))


def nothing() -> None:
    """Plant no bug."""


@dataclass(frozen=True)
class Alone:
    """The run of `dense` that others must equal, without any of our functions.

    Its weights, its forward and backward passes, and its sums of gradients have a dtype each.
    """

    dtype: torch.dtype
    computed: torch.dtype
    summed: torch.dtype


@dataclass(frozen=True)
class Variant:
    """A training run, and the function that plants a bug in it."""

    model: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[], None] = nothing
    symmetric_memory: bool | None = False


@dataclass(frozen=True)
class Sharded:
    """A training run with `fully_shard`: of the root, and of the `layers` of that type."""

    model: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[], None] = nothing
    layers: type[nn.Module] = nn.Linear
    adamw: bool = False  # with clipped gradients
    measured: bool = False  # for memory in place of a digest
    sync_each: bool = True
    has_earlier: bool = False  # whether another reducer of the model, with `sync_each`, was made


# --- planted bugs -------------------------------------------------------------------------------


def add_in_rank_order() -> None:
    """Add the ranks' sums one after another."""

    def in_order(rows: Tensor, *, scale: float, out: Tensor) -> None:
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        torch.mul(total, scale, out=out)

    exchange.add_tree = in_order


def add_distant_rows_first() -> None:
    """Add along another tree, in which the siblings are r and r + W / 2."""

    def distant(rows: Tensor, *, scale: float, out: Tensor) -> None:
        while len(rows) > 1:
            rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
        torch.mul(rows[0], scale, out=out)

    exchange.add_tree = distant


def accumulate_in_order() -> None:
    """Add the micro-batches of a rank one after another, as `.grad` does."""

    def push(self: reducer.Counter, node: reducer.Gradients) -> None:
        if self._nodes:
            reducer.add(self._nodes[0][1].values(), node.values())
        else:
            self._nodes.append((range(1), node))

    reducer.Counter.push = push  # type: ignore[method-assign]


def round_once() -> None:
    """Add the ranks' sums in float32, and round only once, at the end."""
    right = exchange.add_tree

    def wide(rows: Tensor, *, scale: float, out: Tensor) -> None:
        total = torch.empty_like(out, dtype=torch.float32)
        right(rows.float(), scale=scale, out=total)
        out.copy_(total)

    exchange.add_tree = wide


def leave_scale_out() -> None:
    """Use the sum instead of the mean."""
    right = exchange.add_tree
    exchange.add_tree = lambda rows, *, scale, out: right(rows, scale=1.0, out=out)


def drop_tail() -> None:
    """Don't reduce the tail of a bucket."""
    right = exchange.all_reduce

    def whole_units(buffer: Tensor, **options: Any) -> None:
        right(buffer[: len(buffer) // 64 * 64], **options)

    exchange.all_reduce = whole_units


def reduce_as_torch_does() -> None:
    """Reduce-scatter in the order of torch's own."""
    FSDPModule.set_custom_reduce_scatter = lambda self, comm: None  # type: ignore[method-assign]


def add_in_dtype_of_weights() -> None:
    """Add a rank's shards in float32, after a reduce-scatter in bfloat16."""
    right = reducer.Counter.push

    def push(self: reducer.Counter, node: reducer.Gradients) -> None:
        right(self, {key: one.float() for key, one in node.items()})

    reducer.Counter.push = push  # type: ignore[method-assign]


def accumulate_in_grad() -> None:
    """Leave a micro-batch's gradients in `.grad`, where FSDP adds the next ones to them."""
    ShardedReducer._keep = lambda self: self._reduced.clear()  # type: ignore[method-assign]


def always_copy() -> None:
    """Let no kernel read from other ranks' memory (no bug)."""
    from entrenar_py.train.canonical import on_gpus  # needs triton

    on_gpus._READ_BYTES_MAX = 0


def leave_wide_pairs_to_fsdp() -> None:
    """Let FSDP add a gradient to its sibling that is already rounded to a narrower dtype."""
    sharded_reducer._adds_as_tree = lambda group: True


def clip_as_torch_does() -> None:
    """Clip with the norm of torch's own function."""
    ShardedReducer.clip_grad_norm_ = lambda self, max_norm: nn.utils.clip_grad_norm_(  # type: ignore[method-assign]
        self._parameters, max_norm
    )


def add_repeats() -> None:
    """Add what ranks send that only repeat a micro-batch."""
    right = ShardedReducer._add_rows

    def all_rows(self: ShardedReducer, module: str, rows: Tensor, out: Tensor) -> None:
        kept, self._micro_batches = self._micro_batches, 1 << 30
        right(self, module, rows, out)
        self._micro_batches = kept

    ShardedReducer._add_rows = all_rows  # type: ignore[method-assign]


def turn_rows() -> None:
    """Take the last rank's gradient for that of the first micro-batch."""
    right = exchange.scatter
    exchange.scatter = lambda buffer, *, group: right(buffer, group=group).roll(1, 0)


# What the functions above replace.
REPLACED: tuple[tuple[Any, str], ...] = (
    (exchange, "add_tree"),
    (exchange, "all_reduce"),
    (exchange, "scatter"),
    (reducer.Counter, "push"),
    (FSDPModule, "set_custom_reduce_scatter"),
    (ShardedReducer, "_keep"),
    (ShardedReducer, "_add_rows"),
    (ShardedReducer, "clip_grad_norm_"),
    (sharded_reducer, "_adds_as_tree"),
)

FP32, BF16 = lambda: dense(torch.float32), lambda: dense(torch.bfloat16)
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}

RIGHT = {
    "fp32": Variant(FP32),
    "bf16": Variant(BF16, torch.bfloat16),
    "small buckets": Variant(FP32, options=SMALL_BUCKETS),
    "bucket views": Variant(FP32, options={"gradient_as_bucket_view": True}),
    "small bf16 bucket views": Variant(
        BF16, torch.bfloat16, {**SMALL_BUCKETS, "gradient_as_bucket_view": True}
    ),
    "mixed": Variant(Mixed),
    "channels last": Variant(channels_last),
}
PLANTED = {
    "rank order": Variant(FP32, plant=add_in_rank_order),
    "distant siblings": Variant(FP32, plant=add_distant_rows_first),
    "local order": Variant(FP32, plant=accumulate_in_order),
    "rounded once": Variant(BF16, torch.bfloat16, plant=round_once),
    "no scale": Variant(FP32, plant=leave_scale_out),
    "no tail": Variant(FP32, plant=drop_tail),
}
IN_BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
SUMS_IN_FP32 = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
}
SUMS_IN_BF16 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
BY_COLUMNS = {"shard_placement_fn": lambda weight: Shard(weight.ndim - 1)}
RIGHT_SHARDED = {
    "sharded fp32": Sharded(FP32),
    "sharded bf16": Sharded(BF16, torch.bfloat16),
    "sharded whole": Sharded(FP32, layers=nn.Tanh),
    "sharded, kept after forward": Sharded(FP32, options={"reshard_after_forward": False}),
    "sharded, freed after forward": Sharded(FP32, options={"reshard_after_forward": True}),
    "sharded mixed": Sharded(Mixed),
    "sharded tied": Sharded(Tied, layers=nn.Sequential),
    "sharded by columns": Sharded(lambda: nn.Linear(8, 4), options=BY_COLUMNS, layers=nn.Tanh),
    "sharded, computed in bf16": Sharded(FP32, options=IN_BF16),
    "sharded, summed in fp32": Sharded(FP32, options=SUMS_IN_FP32),
    "sharded bf16, summed in fp32": Sharded(BF16, torch.bfloat16, SUMS_IN_FP32),
    "sharded, sync last": Sharded(FP32, sync_each=False),
    "sharded, sync last, after another": Sharded(FP32, sync_each=False, has_earlier=True),
    "sharded bf16, sync last": Sharded(BF16, torch.bfloat16, sync_each=False),
    "sharded tied, sync last": Sharded(Tied, layers=nn.Sequential, sync_each=False),
    "sharded bf16, summed in fp32, sync last": Sharded(
        BF16, torch.bfloat16, SUMS_IN_FP32, sync_each=False
    ),
    "sharded, summed in bf16": Sharded(FP32, options=SUMS_IN_BF16),
    "sharded, summed in bf16, sync last": Sharded(FP32, options=SUMS_IN_BF16, sync_each=False),
    "sharded, AdamW": Sharded(long, adamw=True),
    "sharded bf16, AdamW": Sharded(lambda: long().bfloat16(), torch.bfloat16, adamw=True),
}
MEMORY = {
    "sharded, measured": Sharded(FP32, measured=True),
    "sharded, sync last, measured": Sharded(FP32, measured=True, sync_each=False),
}
PLANTED_SHARDED = {
    "sharded, torch's order": Sharded(FP32, plant=reduce_as_torch_does),
    "sharded, rank order": Sharded(FP32, plant=add_in_rank_order),
    "sharded, distant siblings": Sharded(FP32, plant=add_distant_rows_first),
    "sharded, local order": Sharded(FP32, plant=accumulate_in_order),
    "sharded, sync last, local order": Sharded(FP32, plant=accumulate_in_order, sync_each=False),
    "sharded, sync last, rank order": Sharded(FP32, plant=add_in_rank_order, sync_each=False),
    "sharded, in .grad": Sharded(FP32, plant=accumulate_in_grad),
    "sharded, rounded once": Sharded(BF16, torch.bfloat16, plant=round_once),
    "sharded, two dtypes": Sharded(FP32, options=IN_BF16, plant=add_in_dtype_of_weights),
    "sharded, torch's norm": Sharded(long, adamw=True, plant=clip_as_torch_does),
}
WIDE_PAIRS = {
    "sharded, summed in bf16, wide pairs": Sharded(
        FP32, options=SUMS_IN_BF16, sync_each=False, plant=leave_wide_pairs_to_fsdp
    ),
}
# Bugs in what three ranks do otherwise. The digest of one rank is right.
PLANTED_UNEVEN = {
    "sharded, repeats": Sharded(FP32, plant=add_repeats),
    "sharded, turned rows": Sharded(FP32, plant=turn_rows),
}
# What three ranks train: only `canonical_reduce_scatter` takes any number. FSDP cuts only rows into
# parts that differ.
UNEVEN = PLANTED_UNEVEN.keys() | {
    name
    for name, one in {**RIGHT_SHARDED, **MEMORY}.items()
    if one.sync_each and one.options is not BY_COLUMNS
}
ON_GPUS = {
    "symmetric fp32": Variant(FP32, symmetric_memory=True),
    "symmetric bf16": Variant(BF16, torch.bfloat16, SMALL_BUCKETS, symmetric_memory=True),
    "symmetric fp32, by copies": Variant(FP32, plant=always_copy, symmetric_memory=True),
    "symmetric bf16, by copies": Variant(
        BF16, torch.bfloat16, SMALL_BUCKETS, plant=always_copy, symmetric_memory=True
    ),
}
ALONE = {
    "alone fp32": Alone(torch.float32, torch.float32, torch.float32),
    "alone bf16": Alone(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "alone, computed in bf16": Alone(torch.float32, torch.bfloat16, torch.bfloat16),
    "alone, summed in fp32": Alone(torch.float32, torch.bfloat16, torch.float32),
    "alone bf16, summed in fp32": Alone(torch.bfloat16, torch.bfloat16, torch.float32),
}
VARIANTS: dict[str, Variant | Sharded | Alone] = {
    **RIGHT,
    **PLANTED,
    **ON_GPUS,
    **RIGHT_SHARDED,
    **PLANTED_SHARDED,
    **PLANTED_UNEVEN,
    **MEMORY,
    **WIDE_PAIRS,
    **ALONE,
}


def train(variant: Variant, device: torch.device) -> str:
    """Train, and return the digest of this rank's final weights."""
    variant.plant()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(variant.model().to(device), **variant.options)
    canonical = entrenar_py.canonical_all_reduce(
        ddp, micro_batches=MICRO_BATCHES, symmetric_memory=variant.symmetric_memory
    )
    optimizer = sgd(ddp.parameters())
    for inputs in steps(device, 5, variant.dtype):
        for batch in canonical.fold(inputs[list(canonical.shards)]):
            ddp(batch.to(device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(list(ddp.module.parameters()))


def train_sharded(variant: Sharded, device: torch.device) -> str:
    """Train, and return the digest of the final weights of all ranks."""
    variant.plant()
    torch.manual_seed(0)
    model = variant.model().to(device)
    width = next(one for one in model.modules() if isinstance(one, nn.Linear)).in_features
    options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)), **variant.options}
    for layer in [one for one in model.modules() if isinstance(one, variant.layers)]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if variant.has_earlier:
        entrenar_py.canonical_reduce_scatter(model, micro_batches=MICRO_BATCHES)
    canonical = entrenar_py.canonical_reduce_scatter(
        model, micro_batches=MICRO_BATCHES, sync_each=variant.sync_each
    )
    optimizer = sgd(model.parameters())
    if variant.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    peak = 0.0
    for inputs in steps(device, width, variant.dtype):
        for batch in canonical.fold(inputs[list(canonical.shards)]):
            model(batch.to(device)).float().square().mean().backward()
            peak = max(peak, held(canonical, model))
        if variant.adamw:
            canonical.clip_grad_norm_(0.01)
        optimizer.step()
    if variant.measured:
        return f"{peak:.1f}"
    return digest([one.full_tensor() for one in model.parameters() if isinstance(one, DTensor)])


def held(canonical: ShardedReducer, model: nn.Module) -> float:
    """Return the memory of all gradients, divided by that of this rank's shards with padding."""
    gradients = [
        node
        for one in canonical._counters.values()
        for _, nodes in one._nodes
        for node in nodes.values()
    ]
    for group in canonical._groups.values():
        wholes = [one._unsharded_param.grad for one in group.fsdp_params]
        gradients += [one for one in wholes if one is not None]
    shards = 0
    for one in model.parameters():
        assert isinstance(one, DTensor)
        shards += (
            -(-len(one) // dist.get_world_size()) * (one.numel() // len(one)) * one.element_size()
        )
        if isinstance(one.grad, DTensor):
            gradients.append(one.grad.to_local())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in gradients}
    return sum(one.nbytes() for one in storages.values()) / shards


def train_alone(variant: Alone) -> str:
    """Train with torch only, and return the digest of the weights."""
    torch.manual_seed(0)
    model = dense(variant.dtype)
    weights = dict(model.named_parameters())
    optimizer = sgd(weights.values())
    for inputs in steps(torch.device("cpu"), 5, variant.computed):
        gradients = []
        for batch in inputs:
            cast = {
                name: one.detach().to(variant.computed).requires_grad_()
                for name, one in weights.items()
            }
            loss = torch.func.functional_call(model, cast, (batch,)).float().square().mean()
            found = torch.autograd.grad(loss, list(cast.values()))
            gradients.append([one.to(variant.summed) for one in found])
        while len(gradients) > 1:
            pairs = zip(gradients[0::2], gradients[1::2], strict=True)
            gradients = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        for weight, gradient in zip(weights.values(), gradients[0], strict=True):
            weight.grad = (gradient / MICRO_BATCHES).to(variant.dtype)
        optimizer.step()
    return digest(list(weights.values()))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that multiplies by powers of two.

    torch rounds the product `lr * gradient` to bfloat16 in the last elements of a tensor, and not
    in others. A shard has other last elements than the whole tensor.
    """
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def steps(device: torch.device, width: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the inputs of each step, [MICRO_BATCHES, 4, width]."""
    draws = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS[device.type]):
        yield torch.randn(MICRO_BATCHES, 4, width, generator=draws).to(dtype)


def digest(weights: list[Tensor]) -> str:
    """Return a digest of the bits of `weights`."""
    arrays = [one.detach().float().contiguous().cpu().numpy() for one in weights]
    return hashlib.sha256(b"".join(one.tobytes() for one in arrays)).hexdigest()[:16]


def serve(
    rank: int, world_size: int, store: Path, kind: str, names: list[str], pipe: Connection
) -> None:
    """Send one rank's digest of each variant, and undo the variant's bug after it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    address = f"file://{store}"  # a port could be another's by the time that rank 0 listens
    backend, device, replaced = "gloo", torch.device("cpu"), REPLACED
    if kind == "cuda":
        from entrenar_py.train.canonical import on_gpus  # needs triton

        replaced += ((on_gpus, "_READ_BYTES_MAX"),)
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    found = {}
    for name in names:
        kept = [getattr(owner, attribute) for owner, attribute in replaced]
        variant = VARIANTS[name]
        if isinstance(variant, Alone):
            found[name] = train_alone(variant)
        elif isinstance(variant, Sharded):
            found[name] = train_sharded(variant, device)
        else:
            found[name] = train(variant, device)
        for (owner, attribute), value in zip(replaced, kept, strict=True):
            setattr(owner, attribute, value)
    pipe.send(found)
    dist.destroy_process_group()


def run(kind: str, names: list[str]) -> dict[str, dict[int, list[str]]]:
    """Return the digests of the variants `names`: {variant: {world size: [of each rank]}}."""
    num_ranks_max = torch.cuda.device_count() if kind == "cuda" else 4
    context = multiprocessing.get_context("fork")
    found: dict[str, dict[int, list[str]]] = {name: {} for name in names}
    for world_size in (one for one in WORLDS if one <= num_ranks_max):
        trained = [name for name in names if world_size != 3 or name in UNEVEN]
        pipes, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, world_size, Path(folder) / "store", kind, trained, theirs)
                processes.append(context.Process(target=serve, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            digests = [pipe.recv() for pipe in pipes]
            for process in processes:
                process.join()
        for name in trained:
            found[name][world_size] = [one[name] for one in digests]
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2:])))
