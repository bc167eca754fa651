import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(24, 6)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def apply(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
    optimizer.step()


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = network()
        wide = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
        self.teacher = [wide.requires_grad_(False)]  # in a list: it is no part of the state
        self.teacher[0].eval()

    def forward(self, inputs):
        with torch.no_grad():
            due = self.teacher[0](inputs)
        return self.student(inputs), due


model = Distillation()
ddp = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        output, due = ddp(inputs)
        loss = F.mse_loss(output, targets) + F.mse_loss(output, due)
        obs.loss(loss, len(inputs))
        apply(model, optimizer, loss)
dist.destroy_process_group()
