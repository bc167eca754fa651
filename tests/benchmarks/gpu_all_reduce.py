"""The canonical all-reduce alone beside NCCL's, on GPUs; one JSON line per way, dtype, size, piece.

    CUBLAS_WORKSPACE_CONFIG=:4096:8 torchrun --standalone --nproc_per_node=4 \\
        tests/benchmarks/gpu_all_reduce.py --mib 64 1024 --piece-mib 8 16 32 64

Rounds of both in turns; of each round the slowest rank counts. `ratio` is of the fastest rounds,
`ratio_median` of the medians, ours / NCCL. Those of `queued` rounds begin behind a kernel that
keeps the GPU busy until the host has launched all calls, as in a backward pass. They don't contain
the host's time, which is most of a small buffer's. Before it times anything it compares ours with
the plain path, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import product
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py.train.canonical import exchange
from entrenar_py.train.canonical.on_gpus import Pipeline, Symmetric

WAYS: dict[str, type[Pipeline | Symmetric]] = {"nccl": Pipeline, "symmetric": Symmetric}
CALLS = 10  # of one round
BUSY_CYCLES = 6_000_000  # of a GPU's clock, about 3 ms
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(call: Callable[[], object], *, queued: bool = False) -> float:
    """Return the seconds of one call on the slowest rank: from a common start, over a round."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    dist.barrier()
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        call()  # ranks meet, as their kernels don't end together
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(start.elapsed_time(end) / 1000 / CALLS, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def compare(buffer: Tensor, ours: Pipeline | Symmetric, rounds: int) -> dict[str, float]:
    """Seconds of both, and their ratios."""

    def nccl() -> None:
        dist.all_reduce(buffer, op=dist.ReduceOp.AVG)

    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours(buffer).wait(), "nccl": nccl}
    for call in calls.values():
        seconds(call)
    found: dict[str, list[float]] = {name: [] for name in calls}
    queued: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(seconds(call))
            queued[name].append(seconds(call, queued=True))
    mine, peer = found["ours"], found["nccl"]
    world_size, num_bytes = dist.get_world_size(), buffer.numel() * buffer.element_size()
    moved = num_bytes * 2 * (world_size - 1) / world_size
    return {
        "ratio": min(mine) / min(peer),
        "ratio_median": median(mine) / median(peer),
        "queued_ratio": min(queued["ours"]) / min(queued["nccl"]),
        "queued_ratio_median": median(queued["ours"]) / median(queued["nccl"]),
        "queued_ours_s": min(queued["ours"]),
        "queued_nccl_s": min(queued["nccl"]),
        "ours_s": min(mine),
        "nccl_s": min(peer),
        "ours_bus_gb_s": moved / min(mine) / 1e9,
        "nccl_bus_gb_s": moved / min(peer) / 1e9,
    }


def same_bits(buffer: Tensor, ours: Pipeline | Symmetric, scale: float) -> bool:
    """Return whether every element has the bits of the plain path, on all ranks."""
    group = dist.group.WORLD
    assert group is not None
    expected, got = buffer.clone(), buffer.clone()
    exchange.all_reduce(expected, scale=scale, piece_max=1 << 24, group=group)
    ours(got).wait()
    differ = (got.view(torch.uint8) != expected.view(torch.uint8)).any().int()
    dist.all_reduce(differ)
    return not differ.item()


def main() -> None:
    """Every combination asked for."""
    cli = argparse.ArgumentParser()
    cli.add_argument("--mib", type=float, nargs="+", default=[5.5, 64, 1024])
    cli.add_argument("--way", nargs="+", default=list(WAYS), choices=list(WAYS))
    cli.add_argument("--piece-mib", type=float, nargs="+", default=[32])
    cli.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    cli.add_argument("--rounds", type=int, default=20)
    given = cli.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    scale = 1 / dist.get_world_size()
    facts = {
        "device": torch.cuda.get_device_name(device),
        "world_size": dist.get_world_size(),
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }
    for way, piece_mib in product(given.way, given.piece_mib):
        piece_bytes = int(piece_mib * 2**20)
        ours = WAYS[way](group, scale=scale, device=device, piece_bytes=piece_bytes)
        for mib, dtype in product(given.mib, given.dtype):
            num_elements = int(mib * 2**20) // DTYPES[dtype].itemsize
            torch.manual_seed(dist.get_rank())
            buffer = torch.randn(num_elements, device=device, dtype=DTYPES[dtype])
            what = {"way": way, "mib": mib, "dtype": dtype, "piece_mib": piece_mib}
            bits = same_bits(buffer[: num_elements - 3], ours, scale)
            found = compare(buffer, ours, given.rounds)
            if dist.get_rank() == 0:
                print(json.dumps({**what, "same_bits": bits, **found, **facts}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
