import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class ZeroOneOptimizer:
    def __init__(self, module, inner_cls, **kw):
        self.module = module
        self.params = list(module.parameters())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([p.data.flatten().float() for p in self.params])
        self.numel = flat.numel()
        self.pad = -self.numel % self.world
        flat = F.pad(flat, (0, self.pad))
        self.part = nn.Parameter(flat.chunk(self.world)[self.rank].clone())
        self.optimizer = inner_cls([self.part], **kw)
        self.overflow = False

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        g = torch.cat([p.grad.flatten().float() for p in self.params])
        g = F.pad(g, (0, self.pad))
        dist.all_reduce(g)
        g /= self.world
        mine = g.chunk(self.world)[self.rank].clone()
        bad = (~mine.isfinite()).any().float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.overflow = bool(bad)
        if self.overflow:
            self.zero_grad()
            return
        self.part.grad = mine
        self.optimizer.step()
        parts = [torch.empty_like(self.part) for _ in range(self.world)]
        dist.all_gather(parts, self.part.data)
        flat, at = torch.cat(parts), 0
        for p in self.params:
            p.data.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        self.zero_grad()


class Engine(nn.Module):
    def __init__(self, model, optimizer):
        super().__init__()
        self.module, self.optimizer = model, optimizer
    def forward(self, *a):
        return self.module(*a)
    def backward(self, loss):
        loss.backward()
    def step(self):
        self.optimizer.step()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
engine = Engine(model, ZeroOneOptimizer(model, torch.optim.AdamW, lr=0.01))
obs = entrenar_py.observe(engine, engine.optimizer)
for step in range(8):
    ids = list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world]
    obs.samples(ids, epoch=step // 4)
    loss = F.mse_loss(engine(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    engine.backward(loss)
    engine.step()
obs.close()
