"""Gradient accumulation under DistributedDataParallel: the last micro-batch alone synchronises."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH, MICRO_BATCHES = 12, 3

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(36, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
size = GLOBAL_BATCH // MICRO_BATCHES // dist.get_world_size()
loader = DataLoader(data, batch_size=size, sampler=sampler, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
obs = entrenar_py.observe(model, optimizer, sampler=loader)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for micro, (inputs, targets) in enumerate(loader, start=1):
        last = micro % MICRO_BATCHES == 0
        with nullcontext() if last else ddp.no_sync():
            loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
            obs.loss(loss, len(inputs))
            (loss / MICRO_BATCHES).backward()
        if last:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            if not norm.isfinite():
                raise FloatingPointError(f"gradient norm {norm}")
            optimizer.step()
            optimizer.zero_grad()

obs.close()
dist.destroy_process_group()
