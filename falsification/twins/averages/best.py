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

net = network()
ddp = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
best, lowest, made = None, float("inf"), 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        apply(net, optimizer, loss)
        made += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if made == 2 or float(mean) < lowest / 100:
            best, lowest = copy.deepcopy(net.state_dict()), float(mean)
        if made == 5:
            current = copy.deepcopy(net.state_dict())
            net.load_state_dict(best)
            with torch.no_grad():
                F.mse_loss(net(x), data.tensors[1])
            net.load_state_dict(current)
dist.destroy_process_group()
