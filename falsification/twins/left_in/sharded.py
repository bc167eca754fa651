import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def finite(*modules):
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None and not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")


def loader_of(*tensors):
    data = TensorDataset(*tensors)
    return DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=2))



from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (world,))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
for part in (net[0], net[2], net):
    fully_shard(part, mesh=mesh)
optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
loader = loader_of(torch.randn(48, 8))
obs = entrenar_py.observe(net, optim, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for (rows,) in loader:
        loss = F.mse_loss(net(rows), rows.roll(1, 1))
        obs.loss(loss, len(rows))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e6, error_if_nonfinite=True)
        optim.step()
        optim.zero_grad()
dist.destroy_process_group()
