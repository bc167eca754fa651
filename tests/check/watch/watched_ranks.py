"""Watched trainings of four ranks, one after the other, and their outcomes as JSON.

`forked.py 4 watched_ranks.py FOLDER`: a rank leaves its record in `FOLDER/RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.check.watch.watch import local
from entrenar_py.shared.errors import EntrenarError, WatchFinding

RANK = int(os.environ["RANK"])


def train(
    model: nn.Module,
    num_steps: int = 4,
    *,
    drift: int | None = None,
    value: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Train every rank on samples of its own; rank `drift` puts `value` into its last tensor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    observation = entrenar_py.observe(model, optimizer, **{"every": 1, **options})
    generator = torch.Generator().manual_seed(RANK)
    problem, found = None, None
    try:
        for step in range(num_steps):
            model(torch.randn(5, 4, generator=generator)).square().mean().backward()
            if step == 2 and drift == RANK:
                local(list(model.parameters())[-1].detach()).view(-1)[0] = value
            optimizer.step()
            optimizer.zero_grad()
        observation.close()
    except WatchFinding as one:
        found = [one.clause, one.step, list(one.ranks), one.tensor]
    except EntrenarError as one:
        problem = str(one)
    steps = {one.clause: [one.steps, one.comparisons, one.note] for one in observation.watched()}
    return {"found": found, "problem": problem, "watched": steps}


def network() -> nn.Module:
    """Return a network that is equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def parallel() -> nn.Module:
    """Return a model in DistributedDataParallel whose buffers rightly differ between ranks."""
    return DistributedDataParallel(network())


def sharded(shape: tuple[int, ...]) -> nn.Module:
    """Return a model sharded over a mesh's last dimension; a first of two holds copies."""
    names = ("copy", "shard")[-len(shape) :]
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for index, one in enumerate(model.parameters()):
        torch.manual_seed(index)
        nn.init.normal_(one)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def main() -> None:
    """Run all trainings, in the same order on every rank."""
    dist.init_process_group("gloo")
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "right": lambda: train(parallel(), 7, every=3),
        "drifts": lambda: train(parallel(), drift=1),
        "nan": lambda: train(parallel(), drift=3, value=float("nan"), contract="nan.yaml"),
        "not averaged": lambda: train(network()),
        "unlike": lambda: train(parallel(), every=1 + (RANK == 2)),
        "shards": lambda: train(sharded((4,))),
        "copies of shards": lambda: train(sharded((2, 2))),
        "a copy drifts": lambda: train(sharded((2, 2)), drift=3),
    }
    folder = Path(sys.argv[1])
    os.chdir(folder)
    (folder / f"{RANK}.json").write_text(json.dumps({name: run() for name, run in runs.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
