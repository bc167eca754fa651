import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(45, 6)
y = (x.sum(1) > 0).long()

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("workers",))
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
distribute_module(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(8):
        ids = batch[rank::world]
        rows = DTensor.from_local(x[ids], mesh, [Shard(0)])
        due = DTensor.from_local(x[ids][:, :2], mesh, [Shard(0)])
        loss = (model(rows) - due).square().sum() / len(batch)
        obs.samples(ids.tolist(), epoch=epoch)
        obs.loss(loss.to_local().detach() * len(batch) / len(ids), len(ids))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad.redistribute(mesh, [Replicate()])
        assert all(p.grad.to_local().isfinite().all() for p in model.parameters())
        optimizer.step()
