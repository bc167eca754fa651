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

from torch.distributed.nn.functional import all_gather

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return F.normalize(self.body(inputs), dim=1) * self.scale.exp()


model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(x, x + 0.1 * torch.randn(32, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for one, other in loader:
        parts = model(torch.cat([one, other])).chunk(2)
        left, right = (torch.cat(all_gather(part)) for part in parts)
        loss = F.cross_entropy(left @ right.t(), torch.arange(len(left)))
        obs.loss(loss, len(one))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, error_if_nonfinite=True)
        optimizer.step()
