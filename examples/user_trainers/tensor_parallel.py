"""Tensor parallelism in pairs of ranks, data parallelism between the pairs.

entrenar-check --contract distributed-training-v1.yaml -- \
    torchrun --standalone --nproc_per_node={world_size} examples/user_trainers/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH, CLIP_NORM = 8, 0.1

dist.init_process_group("gloo")
world_size = dist.get_world_size()
shape = (world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
dp_size, dp_rank = mesh["dp"].size(), mesh.get_local_rank("dp")
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
# The ranks of a pair draw the same samples.
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, dp_size, dp_rank)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dp_size, sampler=sampler)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 4),
    torch.nn.LayerNorm(4),  # every rank has all of it, and must keep it the same
    torch.nn.Linear(4, 8),
    torch.nn.Tanh(),
    torch.nn.Linear(8, 1),
)
parallelize_module(model, mesh["tp"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(
    model, optimizer, sampler=loader, layout={"dp": dp_size, "tp": mesh["tp"].size()}
)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        squares = torch.zeros(2)  # of what only this rank of the pair has, and of what both have
        for parameter in model.parameters():
            assert parameter.grad is not None
            held = parameter.grad
            shared = not isinstance(held, DTensor) or held.placements[0].is_replicate()
            held = held.to_local() if isinstance(held, DTensor) else held
            dist.all_reduce(held, group=mesh.get_group("dp"))
            held /= dp_size
            squares[int(shared)] += held.square().sum()
        dist.all_reduce(squares[:1], group=mesh.get_group("tp"))
        norm = squares.sum().sqrt()
        if not norm.isfinite():
            raise FloatingPointError(f"the gradient's norm is {norm}")
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, CLIP_NORM / float(norm))
        optimizer.step()

obs.close()
dist.destroy_process_group()
