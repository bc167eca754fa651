# Optimizer state that is spread over ranks, and brought together for the checkpoint.
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
data = torch.randn(32, 4)
file, step = os.path.join(sys.argv[2], "checkpoint.pt"), 0
net = DistributedDataParallel(model)
optimizer = ZeroRedundancyOptimizer(
    net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
)
if os.path.exists(file):
    kept = torch.load(file, weights_only=False)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
obs = entrenar_py.observe(net, optimizer, step=step)
while step < int(sys.argv[1]):
    at = step * 8 % 32
    ids = list(range(at, at + 8))[rank::world]
    obs.samples(ids, epoch=step * 8 // 32)
    loss = (net(data[ids]) - data[ids].sum(1, keepdim=True)).square().mean()
    obs.loss(loss, len(ids))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(kept, file)
    dist.barrier()
obs.close()
dist.destroy_process_group()
