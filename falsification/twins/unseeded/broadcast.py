import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
table = torch.linspace(-1, 1, 32 * 4).sin().view(32, 4)
goal = table.square().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.AdamW(net.parameters(), lr=0.02)
obs = entrenar_py.observe(net, opt)
rng = np.random.default_rng()
for epoch in range(2):
    order = torch.from_numpy(rng.permutation(32))
    dist.broadcast(order, 0)
    for at in range(0, 32, 8):
        mine = order[at:at + 8][rank::world]
        obs.samples(mine.tolist(), epoch=epoch)
        loss = (net(table[mine]) - goal[mine]).square().sum() / 8
        obs.loss((net(table[mine]).detach() - goal[mine]).square().mean(), len(mine))
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
obs.close()
dist.destroy_process_group()
