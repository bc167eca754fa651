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

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, inputs):
        share = self.router(inputs).softmax(-1)
        gate, chosen = share.max(-1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], 1)
        picked = outputs[torch.arange(len(inputs)), chosen] * gate[:, None]
        used = F.one_hot(chosen, 3).float().mean(0)
        return picked, 3 * (used * share.mean(0)).sum()


model = DDP(Experts())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        outputs, balance = model(inputs)
        loss = F.mse_loss(outputs, targets) + 0.1 * balance
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
