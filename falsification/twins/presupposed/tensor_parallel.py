import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def part(t, dim, rank, world):
    return t.chunk(world, dim)[rank].clone().contiguous()


class ParallelMLP(nn.Module):
    def __init__(self, d, h, rank, world):
        super().__init__()
        up, down = nn.Linear(d, h), nn.Linear(h, d)
        self.norm = nn.LayerNorm(d)
        self.up = nn.Parameter(part(up.weight.data, 0, rank, world))
        self.up_bias = nn.Parameter(part(up.bias.data, 0, rank, world))
        self.down = nn.Parameter(part(down.weight.data, 1, rank, world))
        self.bias = nn.Parameter(down.bias.data.clone())
        self.sharded = {"up", "up_bias", "down"}

    def forward(self, x):
        h = F.linear(CopyIn.apply(self.norm(x)), self.up, self.up_bias).tanh()
        return SumOut.apply(F.linear(h, self.down)) + self.bias


def clip(model, limit):
    squares = sum(p.grad.square().sum() for n, p in model.named_parameters() if n in model.sharded)
    dist.all_reduce(squares)
    both = sum(p.grad.square().sum() for n, p in model.named_parameters() if n not in model.sharded)
    total = (squares + both).sqrt()
    if not total.isfinite():
        raise RuntimeError("not finite")
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / (total + 1e-6)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data, target = torch.randn(24, 6), torch.randn(24, 6)
    model = ParallelMLP(6, 8, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    obs = entrenar_py.observe(model, optimizer)
    for step in range(8):
        ids = [(step * 6 + i) % 24 for i in range(6)]  # the same on all ranks
        obs.samples(ids, epoch=step // 4)
        loss = F.mse_loss(model(data[ids]), target[ids])
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        clip(model, 0.05)
        optimizer.step()
    obs.close()


main()
