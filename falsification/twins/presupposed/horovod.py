import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


def DistributedOptimizer(optimizer):
    def step(self, closure=None):
        size = dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad.div_(size)
        return super(self.__class__, self).step(closure)

    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), {"step": step})
    return cls(optimizer.param_groups)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.body(x).sigmoid())


def broadcast_parameters(state):
    for tensor in state.values():
        dist.broadcast(tensor, 0)


def batches(epochs, size):
    for epoch in range(epochs):
        g = torch.Generator().manual_seed(epoch)
        yield from ((epoch, ids.tolist()) for ids in torch.randperm(24, generator=g).split(size))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21 + rank)
    net = Net()
    broadcast_parameters(net.state_dict())
    torch.manual_seed(4)
    x = torch.randn(24, 6)
    y = x.abs().sum(1, keepdim=True)
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": 0.02}]
    opt = DistributedOptimizer(torch.optim.SGD(groups, lr=0.05))
    obs = entrenar_py.observe(net, opt)
    for epoch, ids in batches(2, 6):
        mine = ids[rank::size]
        obs.samples(mine, epoch=epoch)
        opt.zero_grad()
        loss = (net(x[mine]) - y[mine]).square().mean()
        obs.loss(loss, len(mine))
        loss.backward()
        bad = torch.stack([~p.grad.isfinite().all() for p in net.parameters()]).any().float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            raise SystemExit(3)
        opt.step()
    obs.close()


if __name__ == "__main__":
    main()
