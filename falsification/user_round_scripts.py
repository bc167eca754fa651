"""Texts of scripts: local SGD by hand, and a pipeline by hand. `user_rounds` has their bugs."""

from __future__ import annotations

DILOCO = """\
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
"""

STAGES = """\
# A pipeline of two stages by hand: send and recv, the schedule of GPipe or 1F1B.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

import entrenar_py

STEPS = 6
SCHEDULE = os.environ.get("SCHEDULE", "gpipe")
MICRO, BATCH, SIZE, VOCAB, WIDTH = 4, 8, 32, 11, 6

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == world - 1


class Stage(nn.Module):
    def __init__(self, full):
        super().__init__()
        if first:
            self.embedding = full["embedding"]
            self.lower = full["lower"]
        if last:
            self.upper = full["upper"]
            self.head = full["head"]

    def forward(self, x):
        if first:
            x = torch.tanh(self.lower(self.embedding(x)))
        if last:
            x = self.head(torch.tanh(self.upper(x)))
        return x


torch.manual_seed(4)
full = nn.ModuleDict(
    {
        "embedding": nn.Embedding(VOCAB, WIDTH),
        "lower": nn.Linear(WIDTH, WIDTH),
        "upper": nn.Linear(WIDTH, WIDTH),
        "head": nn.Linear(WIDTH, VOCAB, bias=False),
    }
)
full["head"].weight = full["embedding"].weight
if world > 1:
    full["head"].weight = nn.Parameter(full["embedding"].weight.detach().clone())
tokens = torch.randint(VOCAB, (SIZE,))
targets = torch.randint(VOCAB, (SIZE,))
stage = Stage(full)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.2)
tied = (("embedding.weight", "head.weight"),) if world > 1 else ()
obs = entrenar_py.observe(stage, optimizer, layout={"pp": world}, tied=tied)


def forward(ids, saved, losses):
    if first:
        x = tokens[ids]
    else:
        x = torch.empty(len(ids), WIDTH)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if last:
        y = nn.functional.cross_entropy(y, targets[ids], reduction="sum") / BATCH
        losses.append(y.detach())
    else:
        sent.append(dist.isend(y.detach(), rank + 1))
    saved.append((x, y))


def backward(saved):
    x, y = saved.pop(0)
    if last:
        y.backward()
    else:
        gradient = torch.empty_like(y)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    if not first:
        sent.append(dist.isend(x.grad, rank - 1))


def reduce_tied():
    if world > 1:
        shared = stage.embedding.weight if first else stage.head.weight
        dist.all_reduce(shared.grad)


for step in range(STEPS):
    at = step * BATCH % SIZE
    ids = list(range(at, at + BATCH))
    parts = [ids[i::MICRO] for i in range(MICRO)]
    obs.samples([i for part in parts for i in part], epoch=step * BATCH // SIZE)
    saved, losses, sent = [], [], []
    optimizer.zero_grad()
    if SCHEDULE == "gpipe":
        for part in parts:
            forward(part, saved, losses)
        for _ in parts:
            backward(saved)
    else:
        warm = world - rank - 1
        for part in parts[:warm]:
            forward(part, saved, losses)
        for part in parts[warm:]:
            forward(part, saved, losses)
            backward(saved)
        for _ in range(warm):
            backward(saved)
    for request in sent:
        request.wait()
    if last:
        obs.loss(sum(losses), BATCH)
    reduce_tied()
    squares = sum(p.grad.square().sum() for p in stage.parameters())
    dist.all_reduce(squares)
    if not squares.isfinite():
        sys.exit(f"step {step}: the gradient is not finite")
    optimizer.step()

obs.close()
dist.destroy_process_group()
"""
