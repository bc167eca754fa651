"""A step of FSDP2 with the canonical reduce-scatter and with torch's own, by turns in one process.

    export CUBLAS_WORKSPACE_CONFIG=:4096:8
    torchrun --standalone --nproc_per_node=2 -m tests.benchmarks.sharded_on_gpus

The transformer of `elastic_on_gpus.py`, one `fully_shard` for each block. The first rank prints as
JSON the time of a step, the most memory of a rank, and the digest of the weights after the steps,
which has to be the same on any number of ranks. CI does not run it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import entrenar_py
from tests.benchmarks.elastic_on_gpus import (
    LARGE,
    MICRO_BATCHES,
    SMALL,
    batches,
    build,
    device_of_rank,
)

ROUNDS, STEPS = 3, 5


def sharded(device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer."""
    model, _ = build(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def digest(model: nn.Module) -> str:
    """Return a digest of the whole weights."""
    found = hashlib.sha256()
    for one in model.parameters():
        whole: Tensor = one.full_tensor()  # type: ignore[attr-defined]
        found.update(whole.cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Measure on the ranks that torchrun started, or on one."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = MICRO_BATCHES // world_size
    found: dict[str, Any] = {"ranks": world_size}

    def canonical(number: int, rows: list[Tensor]) -> None:
        (model, optimizer), reducer = ours[number], reducers[number]
        for batch in reducer.fold([rows[shard] for shard in reducer.shards]):
            model(batch).backward()
        optimizer.step()

    def stock(rows: list[Tensor]) -> None:
        mine = rows[rank * share :][:share]
        for index, batch in enumerate(mine):
            peer[0].set_requires_gradient_sync(index == share - 1)
            (peer[0](batch) / share).backward()
        peer[1].step()
        peer[1].zero_grad()

    ours, peer = [sharded(device), sharded(device)], sharded(device)
    reducers = [
        entrenar_py.canonical_reduce_scatter(
            model, micro_batches=MICRO_BATCHES, sync_each=bool(number)
        )
        for number, (model, _) in enumerate(ours)
    ]
    kinds: dict[str, Callable[[list[Tensor]], None]] = {
        "canonical, sync last": partial(canonical, 0),
        "canonical, sync each": partial(canonical, 1),
        "stock, sync last": stock,
    }
    for size in (SMALL, LARGE) if device.type == "cuda" else (SMALL,):
        rows = batches(0, device, size)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        most: dict[str, float] = {}
        for turn in range(ROUNDS + 1):
            for name, kind in kinds.items():
                dist.barrier()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                for _ in range(STEPS):
                    kind(rows)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    most[name] = torch.cuda.max_memory_allocated() / 1e9
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - began) / STEPS)
        found["{} x {}".format(*size)] = {
            name: {"median_ms": round(median(one), 1), "peak_gb": round(most.get(name, 0.0), 2)}
            for name, one in times.items()
        }
        found["digests {} x {}".format(*size)] = [digest(model) for model, _ in ours]
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    main()
