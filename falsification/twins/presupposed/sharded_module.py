import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[dist.get_rank()] / world


class Sharded(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.shapes = [(n, p.shape, p.numel()) for n, p in block.named_parameters()]
        flat = torch.cat([p.data.flatten() for p in block.parameters()])
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
        object.__setattr__(self, "block", block.requires_grad_(False))

    def forward(self, x):
        flat, at, held = Gather.apply(self.shard), 0, {}
        for name, shape, size in self.shapes:
            held[name] = flat[at:at + size].view(shape)
            at += size
        return torch.func.functional_call(self.block, held, (x,))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    R, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = nn.Sequential(Sharded(nn.Linear(3, 8)), nn.Tanh(), Sharded(nn.Linear(8, 2)))
    xs, ys = torch.randn(16, 3), torch.randn(16, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    obs = entrenar_py.observe(model, optim)
    for step in range(6):
        ids = [i for i in range(step % 2 * 8, step % 2 * 8 + 8)][R::W]
        obs.samples(ids, epoch=step // 2)
        loss = (model(xs[ids]) - ys[ids]).pow(2).mean()
        obs.loss(loss, len(ids))
        optim.zero_grad(set_to_none=True)
        loss.backward()
        bad = sum((~p.grad.isfinite()).sum() for p in model.parameters()).float()
        dist.all_reduce(bad)
        if bad > 0:
            raise ValueError("not finite")
        optim.step()
    obs.close()
