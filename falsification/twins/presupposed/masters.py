import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
masters = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
opt = torch.optim.AdamW(masters, lr=0.02)
xs = torch.randn(32, 4)
ys = xs.cos().sum(1, keepdim=True)
obs = entrenar_py.observe(net, opt)

def train_step(ids, epoch):
    obs.samples(ids, epoch=epoch)
    net.zero_grad()
    loss = F.mse_loss(net(xs[ids].bfloat16()).float(), ys[ids])
    obs.loss(loss, len(ids))
    loss.backward()
    for p, m in zip(net.parameters(), masters):
        m.grad = p.grad.float()
        dist.all_reduce(m.grad)
        m.grad /= world
    if not all(m.grad.isfinite().all() for m in masters):
        raise RuntimeError("not finite")
    opt.step()
    for p, m in zip(net.parameters(), masters):
        p.data.copy_(m)

for step in range(8):
    train_step(list(range(step % 4 * 8, step % 4 * 8 + 8))[rank::world], step // 4)
obs.close()
