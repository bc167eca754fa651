import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
real = torch.randn(24, 3) + 2
noise = torch.randn(24, 2)
G = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
D = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
opt_g = torch.optim.SGD(G.parameters(), lr=0.05)
opt_d = torch.optim.SGD(D.parameters(), lr=0.05)
obs = entrenar_py.observe(nn.ModuleList([G, D]), [opt_d, opt_g])
bce = nn.functional.binary_cross_entropy_with_logits


def average(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
        assert p.grad.isfinite().all()


for at in range(0, 24, 8):
    ids = list(range(at, at + 8))[rank::world]
    ones, zeros = torch.ones(len(ids), 1), torch.zeros(len(ids), 1)
    obs.samples(ids, epoch=0)
    opt_d.zero_grad()
    fake = G(noise[ids])
    (bce(D(real[ids]), ones) + bce(D(fake.detach()), zeros)).backward()
    average(D)
    opt_d.step()
    opt_g.zero_grad()
    bce(D(fake), ones).backward()
    average(G)
    opt_g.step()
obs.close()
dist.destroy_process_group()
