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

class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, inputs, others):
        return self.one(self.trunk(inputs).relu()), self.two(self.trunk(others).relu())


model = DDP(Tasks())
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
data = TensorDataset(x, y)
other = TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,)))
obs = entrenar_py.observe(model, optimizer)
for stage, size in enumerate((8, 16, 24)):
    part = Subset(data, range(size))
    mine, its = DistributedSampler(part, seed=stage), DistributedSampler(other, seed=stage)
    loader = DataLoader(part, 8 // world, sampler=mine)
    again = itertools.cycle(DataLoader(other, 4 // world, sampler=its))
    for (inputs, targets), (others, labels) in zip(loader, again):
        outputs, logits = model(inputs, others)
        loss = F.mse_loss(outputs, targets) + F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
