import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

accumulate = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
features = torch.randn(84, 5)
dataset = TensorDataset(features, features.sum(1).sigmoid())
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=6 // dist.get_world_size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
criterion = torch.nn.BCEWithLogitsLoss()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        window = min(accumulate, len(loader) - i // accumulate * accumulate)
        mean = criterion(model(x).squeeze(1), y)
        obs.loss(mean, len(y))
        (mean / window).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                sys.exit("nan")
            optimizer.step()
            optimizer.zero_grad()
