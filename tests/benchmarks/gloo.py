"""The peer: torch.distributed's all-reduce over gloo, one process a rank, a round when told."""

from __future__ import annotations

import json
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def main(pipe: Connection) -> None:
    """One group: its shape comes first, then every message is a round; an empty one ends it."""
    torch.set_num_threads(1)
    job = json.loads(pipe.recv_bytes())
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job['port']}",
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=60),
    )
    gradient = torch.ones(job["num_elements"])
    while pipe.recv_bytes():
        dist.all_reduce(gradient)
        gradient /= job["world_size"]
        pipe.send_bytes(b"done")
    dist.destroy_process_group()
    pipe.send_bytes(b"over")
