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

from torch.distributed.algorithms.join import Join

model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
counts = [5, 3, 4, 4][:world] if world > 1 else [8]
first = 4 * sum(counts[:rank])
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    with Join([model], divide_by_initial_world_size=False):
        for batch in range(counts[rank]):
            ids = [(first + 4 * batch + k) % 32 for k in range(4)]
            obs.samples(ids, epoch=epoch)
            loss = F.mse_loss(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 9.0, error_if_nonfinite=True)
            optimizer.step()
