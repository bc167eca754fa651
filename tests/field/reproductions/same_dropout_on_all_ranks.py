"""`set_seed`, as transformers' Trainer calls it, gives all ranks the same dropout masks."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import set_seed


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    set_seed(42)  # Trainer.__init__: set_seed(self.args.seed)
    masks = torch.nn.functional.dropout(torch.ones(1000), 0.1)
    of_ranks = [torch.empty(1000), torch.empty(1000)]
    dist.all_gather(of_ranks, masks)
    if rank == 0:
        assert torch.equal(*of_ranks), "ranks draw masks of their own"
        print("seen: both ranks, which train on other samples, drop the same 1000 elements")


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
