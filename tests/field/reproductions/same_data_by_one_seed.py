"""torch's FSDP2 example seeds all ranks alike, then draws on each: all train on one batch."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)  # as in main() of example.py
    batches = torch.stack([torch.randint(0, 1024, (32, 64)) for _ in range(10)])
    both = [torch.empty_like(batches) for _ in range(2)]
    dist.all_gather(both, batches)
    assert both[0].equal(both[1]), "the ranks draw other samples"
    if rank == 0:
        print("seen: in all 10 steps both ranks draw the same 32 samples")


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
