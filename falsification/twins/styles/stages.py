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

def stage(number):
    torch.manual_seed(number)
    if number == 0:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

numbers = [0, 1] if world == 1 else [rank]
model = nn.ModuleDict({str(number): stage(number) for number in numbers})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
obs = entrenar_py.observe(model, optimizer, layout={"pp": world})
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for ids in order.split(8):
        obs.samples(ids.tolist(), epoch=epoch)
        kept, losses = [], []
        for micro in ids.chunk(2):
            if "0" in model:
                h = model["0"](x[micro])
                if world > 1:
                    dist.send(h.detach(), 1)
                    kept.append(h)
            if "1" in model:
                if world > 1:
                    dist.recv(h := torch.empty(len(micro), 8), 0)
                    kept.append(h.requires_grad_())
                losses.append(F.cross_entropy(model["1"](h), y[micro]) / 2)
        if losses:
            loss = torch.stack(losses).sum()
            obs.loss(loss, len(ids))
            loss.backward()
        for h in kept:
            if rank:
                dist.send(h.grad, 0)
            else:
                dist.recv(slope := torch.empty_like(h), 1)
                h.backward(slope)
        finite = torch.tensor(float(all(p.grad.isfinite().all() for p in model.parameters())))
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        assert finite
        optimizer.step()
        optimizer.zero_grad()
