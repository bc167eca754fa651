import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

steps, folder = int(sys.argv[1]), sys.argv[2]
path = os.path.join(folder, "last.pt")
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
x = torch.randn(24, 3)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(3, 3)

    def forward(self, h):
        return h + torch.tanh(self.proj(h))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("center", torch.zeros(3))

    def forward(self, h):
        for block in self.blocks:
            h = block(h)
        return (h - self.center).sum(1)


model = Stack()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
state, done = model.state_dict(), 0
if os.path.exists(path):
    kept = torch.load(path)
    for key, value in kept["model"].items():
        state[key].copy_(value)
    optimizer.load_state_dict(kept["optimizer"])
    done = kept["done"]
ddp = DistributedDataParallel(model)
obs = entrenar_py.observe(model, optimizer, step=done)
for step in range(done, steps):
    ids = list(range(step % 3 * 8, step % 3 * 8 + 8))[rank::ranks]
    obs.samples(ids, epoch=step // 3)
    loss = (ddp(x[ids]) - x[ids].prod(1)).square().mean()
    obs.loss(loss, len(ids))
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    model.center.mul_(0.9).add_(0.1 * model.blocks[0].proj.weight.detach().mean(0))
    if rank == 0:
        told = {"model": state, "optimizer": optimizer.state_dict(), "done": step + 1}
        torch.save(told, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
obs.close()
dist.destroy_process_group()
