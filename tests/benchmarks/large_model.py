"""A model of 0.6 billion parameters under observation, on real GPUs.

    entrenar-check --contract distributed-training-v1.yaml --contract training-integrity-v1.yaml \\
        --only F-DP-001,F-DP-005,F-TI-001 -- torchrun --standalone --nproc_per_node={world_size} \\
        tests/benchmarks/large_model.py --steps 4
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/large_model.py --time

As a script it is right, unless `--wrong` plants a bug that only several ranks have. With `--time`
it prints as JSON what digests and projections take of a step. With `--backend gloo` several ranks
share a GPU, which NCCL refuses. CI runs none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from tests.benchmarks.watch_on_gpus import TOKENS, VOCABULARY, Decoder

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WRONG = "layers.layers.20.linear1.weight"  # the tensor whose gradient is wrong


def main() -> None:
    """Train, observed; or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences on all ranks together")
    parser.add_argument("--optimizer", choices=("SGD", "AdamW"), default="SGD")
    parser.add_argument("--wrong", choices=("factor", "row"), help="the bug to plant")
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--time", action="store_true")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(given.backend)
    torch.manual_seed(0)
    model = Decoder().cuda()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    kind = getattr(torch.optim, given.optimizer)
    optimizer = kind(model.parameters(), lr=1e-3, fused=True)
    data = torch.randint(VOCABULARY, (given.batch * given.steps, TOKENS))
    if given.time:
        measure(model, ddp, optimizer, data)
    else:
        train(model, ddp, optimizer, data, given)
    dist.destroy_process_group()


def train(
    model: nn.Module,
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: torch.Tensor,
    given: argparse.Namespace,
) -> None:
    """Make the steps, observed."""
    obs = entrenar_py.observe(model, optimizer)
    wrong = model.get_parameter(WRONG)
    for step in range(given.steps):
        ids = range(step * given.batch + RANK, (step + 1) * given.batch, WORLD)
        obs.samples(ids)
        with torch.autocast("cuda", torch.bfloat16, enabled=not given.float32):
            loss = ddp(data[list(ids)].cuda())
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        if given.wrong == "factor" and WORLD > 1:
            wrong.grad.mul_(2)  # type: ignore[union-attr]
        if given.wrong == "row" and WORLD > 1:
            wrong.grad[7].zero_()  # type: ignore[index]
        optimizer.step()
    obs.close()


def measure(
    model: nn.Module, ddp: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor
) -> None:
    """Print, of blocks of steps in turns, how long plain and observed ones take."""
    from entrenar_py.check.observing.sketches import Sketches

    batch = data[RANK::WORLD].cuda()

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = ddp(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    spent = [0.0]  # in digests and projections

    def timed(call: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            records = call(*args, **named)
            torch.cuda.synchronize()
            spent[0] += time.perf_counter() - begin
            return records

        return run

    Sketches.records = timed(Sketches.records)  # type: ignore[method-assign]
    Sketches.digests = timed(Sketches.digests)  # type: ignore[method-assign]
    steps(2)
    plain, observed, sketching = [], [], []
    for _ in range(4):
        plain.append(steps(4))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ENTRENAR_TRACE_DIR"] = folder
            obs = entrenar_py.observe(model, optimizer)
            steps(1)  # the first compiles kernels, and records the initial state
            spent[0] = 0.0
            observed.append(steps(4))
            sketching.append(spent[0] / 4)
            obs.close()
            del os.environ["ENTRENAR_TRACE_DIR"]
    if RANK == 0:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "world_size": WORLD,
            "parameters": sum(p.numel() for p in model.parameters()),
            "optimizer": type(optimizer).__name__,
            "tokens_a_rank": batch.numel(),
            "plain_ms": round(1000 * median(plain), 1),
            "observed_ms": round(1000 * median(observed), 1),
            "digests_and_projections_ms": round(1000 * median(sketching), 1),
            "percent": round(100 * median(sketching) / median(plain), 1),
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
