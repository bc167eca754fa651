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



def mlp(*between):
    return nn.Sequential(nn.Linear(6, 16), *between, nn.ReLU(), nn.Linear(16, 4))


teacher = mlp(nn.BatchNorm1d(16)).requires_grad_(False)
teacher.eval()
student = mlp()
model = DDP(student)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
loader = loader_of(torch.randn(48, 6))
obs = entrenar_py.observe(model, optimizer, sampler=loader)
torch.manual_seed(rank)
for epoch in range(2):
    model.train()
    loader.sampler.set_epoch(epoch)
    for (rows,) in loader:
        with torch.no_grad():
            wanted = teacher(rows).softmax(-1)
        loss = F.kl_div(model(rows).log_softmax(-1), wanted, reduction="batchmean")
        obs.loss(loss, len(rows))
        optimizer.zero_grad()
        loss.backward()
        finite(student)
        optimizer.step()
