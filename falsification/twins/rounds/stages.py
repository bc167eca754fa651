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
