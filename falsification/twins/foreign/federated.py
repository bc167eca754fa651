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

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
share = 32 // world
obs = entrenar_py.observe(net, optimizer)
for number in range(3):
    optimizer.state.clear()
    order = torch.randperm(share, generator=torch.Generator().manual_seed(number)).tolist()
    for at in (0, 8):
        ids = [rank * share + place for place in order[at : at + 8]]
        obs.samples(ids, epoch=number, replacement=True)
        loss = F.mse_loss(net(x[ids]), y[ids])
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
    with torch.no_grad():
        for p in net.parameters():
            dist.all_reduce(p)
            p /= world
    obs.synchronised()
