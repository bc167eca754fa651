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

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
parts = [list(net[at].parameters()) for at in (0, 2, 4)]
shared = [[p.detach().clone() for p in part] for part in parts]
outer = [torch.optim.SGD(part, lr=0.7, momentum=0.9, nesterov=True) for part in shared]
inner = torch.optim.AdamW(net.parameters(), lr=4e-3)
torch.manual_seed(10 + rank)
obs = entrenar_py.observe(net, inner)
sent = None
for step in range(7):
    ids = torch.randint(0, 32, (4,)).tolist()
    obs.samples(ids, replacement=True)
    loss = F.mse_loss(net(x[ids]), y[ids])
    inner.zero_grad()
    loss.backward()
    inner.step()
    if sent is not None:
        at, deltas, works = sent
        for work in works:
            work.wait()
        for tensor, delta in zip(shared[at], deltas):
            tensor.grad = delta / world
        outer[at].step()
        with torch.no_grad():
            for p, tensor in zip(parts[at], shared[at]):
                p.copy_(0.5 * p + 0.5 * tensor)
    at = step % 3
    deltas = [(tensor - p.detach()).clone() for tensor, p in zip(shared[at], parts[at])]
    sent = at, deltas, [dist.all_reduce(delta, async_op=True) for delta in deltas]
for work in sent[2]:
    work.wait()
