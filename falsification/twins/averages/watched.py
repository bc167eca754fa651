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
x = torch.randn(48, 6)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=4 // world, sampler=sampler)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def apply(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
    optimizer.step()

net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
ddp = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
made = 0


@torch.no_grad()
def validate(module):
    module.eval()
    score = F.mse_loss(module(x), data.tensors[1]).item()
    module.train()
    return score


def distribute_statistics(module):
    for buffer in module.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world


lowest, best = float("inf"), None
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        apply(net, optimizer, loss)
        average.update_parameters(net)
        made += 1
        if made % 4 == 0:
            distribute_statistics(average)
    scores = validate(net), validate(average)
    if rank == 0 and scores[1] < lowest:
        lowest, best = scores[1], copy.deepcopy(average.module.state_dict())
        print("best", epoch, scores)
dist.destroy_process_group()
