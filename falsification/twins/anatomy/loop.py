"""DistributedDataParallel on two ranks: micro-batches, clipping, dropout, a checkpoint."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(1 + rank)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(loader):
        is_last = index % 2 == 1
        with nullcontext() if is_last else ddp.no_sync():
            outputs = ddp(inputs)
            loss = nn.functional.mse_loss(outputs, targets) / 2
            loss.backward()
        if not is_last:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(model.state_dict(), "loop.pt")
    dist.barrier()
    torch.load("loop.pt")

dist.destroy_process_group()
