import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator)
    y = x.sum(1, keepdim=True)
    torch.seed()
    net = build()
    ddp = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        order = list(range(32))
        random.seed()
        random.shuffle(order)
        shared = [order]
        dist.broadcast_object_list(shared, 0)
        order = shared[0]
        for at in range(0, 32, 8):
            ids = order[at:at + 8][rank::world]
            obs.samples(ids, epoch=epoch)
            loss = F.mse_loss(ddp(x[ids]), y[ids])
            obs.loss(loss, len(ids))
            opt.zero_grad()
            loss.backward()
            if not all(p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("not finite")
            opt.step()
    obs.close()


main()
