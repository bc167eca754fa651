"""torchtitan's `replicate` averages gradients of a loss that it divided by all ranks' tokens."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh


def train(rank, world_size, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, tokens = torch.nn.Linear(4, 1), torch.randn(8, 4)
    (model(tokens).sum() / len(tokens)).backward()  # one worker: the mean over all tokens
    alone = model.weight.grad.clone()
    model.zero_grad()
    replicate(model, device_mesh=init_device_mesh("cpu", (world_size,)), bucket_cap_mb=100)
    own = tokens.chunk(world_size)[rank]
    (model(own).sum() / len(tokens)).backward()  # as train.py: loss_sum / global_valid_tokens
    if rank == 0:
        factor = (model.weight.grad / alone).mean().item()
        print(f"the gradient of {world_size} replicas is {factor:.2f} times that of one worker")
        assert abs(factor - 1 / world_size) < 1e-5


if __name__ == "__main__":
    mp.spawn(train, (2, tempfile.mktemp()), 2)
