"""Trains small models with the canonical all-reduce on ranks forked from one process.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Loaded before the fork, as the first optimizer of every rank would load it after that.
import torch._dynamo.aot_compile
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.train.canonical import exchange, reducer

WORLDS = (1, 2, 4, 8)
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


def nothing() -> None:
    """Plant no bug."""


@dataclass(frozen=True)
class Variant:
    """A training run, and the function that plants a bug in it."""

    model: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    plant: Callable[[], None] = nothing
    symmetric_memory: bool | None = False


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
ON_GPUS = {
    "symmetric fp32": Variant(FP32, symmetric_memory=True),
    "symmetric bf16": Variant(BF16, torch.bfloat16, SMALL_BUCKETS, symmetric_memory=True),
}
VARIANTS = RIGHT | PLANTED | ON_GPUS


def train(variant: Variant, device: torch.device) -> str:
    """Train, and return the digest of this rank's final weights."""
    variant.plant()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(variant.model().to(device), **variant.options)
    canonical = entrenar_py.canonical_all_reduce(
        ddp, micro_batches=MICRO_BATCHES, symmetric_memory=variant.symmetric_memory
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS[device.type]):
        inputs = torch.randn(MICRO_BATCHES, 4, 5, generator=draws).to(variant.dtype)
        for batch in canonical.fold(inputs[list(canonical.shards)]):
            ddp(batch.to(device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [one.detach().float().contiguous().cpu().numpy() for one in ddp.module.parameters()]
    return hashlib.sha256(b"".join(one.tobytes() for one in weights)).hexdigest()[:16]


def serve(
    rank: int, world_size: int, store: Path, kind: str, names: list[str], pipe: Connection
) -> None:
    """Send one rank's digest of each variant, and undo the variant's bug after it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    address = f"file://{store}"  # a port could be another's by the time that rank 0 listens
    backend, device = "gloo", torch.device("cpu")
    if kind == "cuda":
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    found = {}
    for name in names:
        kept = exchange.add_tree, exchange.all_reduce, reducer.Counter.push
        found[name] = train(VARIANTS[name], device)
        exchange.add_tree, exchange.all_reduce, reducer.Counter.push = kept  # type: ignore[method-assign]
    pipe.send(found)
    dist.destroy_process_group()


def run(kind: str, names: list[str]) -> dict[str, dict[int, list[str]]]:
    """Return the digests of the variants `names`: {variant: {world size: [of each rank]}}."""
    num_ranks_max = torch.cuda.device_count() if kind == "cuda" else 4
    context = multiprocessing.get_context("fork")
    found: dict[str, dict[int, list[str]]] = {name: {} for name in names}
    for world_size in (one for one in WORLDS if one <= num_ranks_max):
        pipes, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, world_size, Path(folder) / "store", kind, names, theirs)
                processes.append(context.Process(target=serve, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            digests = [pipe.recv() for pipe in pipes]
            for process in processes:
                process.join()
        for name in names:
            found[name][world_size] = [one[name] for one in digests]
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2:])))
