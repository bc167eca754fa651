"""One NaN in one gradient of one rank: after a step with clipping, all weights are NaN on all."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.full((1, 4), float(rank))
    if rank == 1:
        inputs[0, 0] = float("nan")  # as one bad sample
    model(inputs)[0, 0].backward()  # so the gradients of the second output are 0
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0:
        assert all(p.isnan().all() for p in model.parameters()), "the step was not made"
        print("seen: rank 0, whose data are finite, stepped, and each of its weights is NaN")
    dist.barrier()  # a rank that leaves while another still sends ends that one
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (tempfile.mktemp(),), nprocs=2)
