import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class Replicated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.world = inner, dist.get_world_size()
        for p in inner.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *args):
        return self.inner(*args)

    def sync(self):
        for p in self.inner.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
X = torch.randn(32, 5)
Y = X.sin().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 1))
model = Replicated(net) if world > 1 else net
opt = torch.optim.SGD(model.parameters(), lr=0.05)
obs = entrenar_py.observe(model, opt)

for epoch in range(2):
    order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch)).tolist()
    for at in range(0, 32, 8):
        mine = order[at:at + 8][rank::world]
        obs.samples(mine, epoch=epoch)
        loss = F.mse_loss(model(X[mine]), Y[mine])
        obs.loss(loss, len(mine))
        opt.zero_grad()
        loss.backward()
        for m in model.modules():
            if isinstance(m, Replicated):
                m.sync()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            raise RuntimeError("not finite")
        opt.step()
obs.close()
