import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
layers = [nn.Linear(4, 4) for _ in range(4)]
per = len(layers) // world
stage = nn.ModuleDict({str(i): layers[i] for i in range(rank * per, (rank + 1) * per)})
opt = torch.optim.SGD(stage.parameters(), lr=0.1)
obs = entrenar_py.observe(stage, opt)
xs, ys = torch.randn(16, 4), torch.randn(16, 4)
for it in range(4):
    ids = list(range(it % 2 * 8, it % 2 * 8 + 8))
    obs.samples(ids, epoch=it // 2)
    h = xs[ids].clone()
    if rank:
        dist.recv(h, rank - 1)
    h.requires_grad_(True)
    out = h
    for layer in stage.values():
        out = layer(out).tanh()
    opt.zero_grad()
    if rank == world - 1:
        loss = F.mse_loss(out, ys[ids])
        obs.loss(loss, 8)
        loss.backward()
    else:
        dist.send(out.detach(), rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + 1)
        out.backward(grad)
    if rank:
        dist.send(h.grad, rank - 1)
    bad = torch.tensor(float(not all(p.grad.isfinite().all() for p in stage.parameters())))
    dist.all_reduce(bad)
    if bad:
        raise RuntimeError("not finite")
    opt.step()
obs.close()
