"""Two ranks that reduce their gradients themselves."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
body, head = nn.Linear(4, 6), nn.Linear(6, 1)
model = nn.Sequential(body, nn.Tanh(), head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(4):
    picked = torch.arange(4 * step + 2 * rank, 4 * step + 2 * rank + 2)
    loss = nn.functional.mse_loss(model(x[picked]), y[picked])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

dist.destroy_process_group()
