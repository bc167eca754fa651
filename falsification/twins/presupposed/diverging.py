import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 1))
ddp = DDP(net)
opt = torch.optim.SGD(net.parameters(), lr=30.0)
obs = entrenar_py.observe(net, opt)
for step in range(12):
    ids = list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world]
    obs.samples(ids, epoch=step // 4)
    loss = F.mse_loss(ddp(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    opt.step()
obs.close()
