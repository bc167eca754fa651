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

from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
obs = entrenar_py.observe(model, optimizer)

def loss_of(parameters, sample, label):
    return F.cross_entropy(functional_call(model, parameters, (sample[None],)), label[None])

each = vmap(grad(loss_of), in_dims=(None, 0, 0))
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(8):
        ids = batch[rank::world]
        found = each({n: p.detach() for n, p in model.named_parameters()}, x[ids], y[ids])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        shorter = (1 / (norms + 1e-6)).clamp(max=1)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("i,i...->...", shorter, found[name])
            dist.all_reduce(p.grad)
            p.grad /= len(batch)
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
