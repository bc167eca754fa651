# DiLoCo by hand: each worker steps alone, and an outer SGD moves the weights that all share.
import sys

import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

STEPS = int(sys.argv[1])
HOME = sys.argv[2] if len(sys.argv) > 2 else ""
H, BATCH, SIZE = 2, 6, 48

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 2))
features = torch.randn(SIZE, 6)
labels = features[:, :2] * 0.5 + 0.1
for tensor in net.state_dict().values():
    dist.broadcast(tensor, src=0)

inner = torch.optim.AdamW(net.parameters(), lr=5e-3)
shared = {name: p.detach().clone() for name, p in net.named_parameters()}
outer = torch.optim.SGD(shared.values(), lr=0.7, momentum=0.9, nesterov=True)
obs = entrenar_py.observe(net, inner)


def my_batches():
    epoch = 0
    while True:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist()
        for at in range(0, SIZE, BATCH):
            yield epoch, order[at : at + BATCH][rank::world]
        epoch += 1


def outer_step():
    for name, p in net.named_parameters():
        delta = shared[name] - p.data
        dist.all_reduce(delta)
        shared[name].grad = delta / world
    outer.step()
    outer.zero_grad()
    for name, p in net.named_parameters():
        p.data.copy_(shared[name])


for step, (epoch, ids) in zip(range(STEPS), my_batches()):
    obs.samples(ids, epoch=epoch)
    loss = nn.functional.smooth_l1_loss(net(features[ids]), labels[ids])
    obs.loss(loss, len(ids))
    inner.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise RuntimeError(f"worker {rank}: gradient norm {norm} in step {step}")
    inner.step()
    logged = loss.detach().clone()
    dist.all_reduce(logged)  # the mean loss, for the log alone
    if (step + 1) % H == 0:
        outer_step()
        obs.synchronised(outer, shared)
    dist.barrier()

obs.close()
dist.destroy_process_group()
