import itertools
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)

from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
inner = torch.optim.SGD(net.parameters(), lr=0.05)
averager = averagers.PeriodicModelAverager(period=2, warmup_steps=0)
optimizer = PostLocalSGDOptimizer(optim=inner, averager=averager)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
