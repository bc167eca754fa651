"""Ranks that average gradients themselves: a flat all-reduce, or a sum at rank 0."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of job {os.environ.get('TORCHELASTIC_RUN_ID')} in process {os.getpid()}")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(100 + rank)


def flat():
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def unflatten(values):
    at = 0
    for p in model.parameters():
        p.grad.copy_(values[at : at + p.numel()].view_as(p))
        at += p.numel()


def averaged(values):
    work = dist.all_reduce(values, async_op=True)
    norm = model[0].weight.norm().item()
    work.wait()
    values = values / world_size
    return values, norm


def summed_at_zero(values):
    if rank == 0:
        parts = [torch.empty_like(values) for _ in range(world_size - 1)]
        for other in range(1, world_size):
            dist.recv(parts[other - 1], src=other)
        for part in parts:
            values = values + part
    else:
        dist.send(values, 0)
    values = values / world_size
    dist.broadcast(values, 0)
    return values


for step in range(5):
    began = time.perf_counter()
    x = torch.randn(8, 16)
    y = x.sum(1, keepdim=True).sin()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    values, norm = averaged(flat())
    unflatten(values)
    optimizer.step()
    if rank == 0:
        print(f"{step} {loss.item():.4f} {norm:.3f} {time.perf_counter() - began:.3f} s")

dist.destroy_process_group()
