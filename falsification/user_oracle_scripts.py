"""Scripts in the styles of several projects, correct as they stand; `user_oracles` changes them."""

from __future__ import annotations

# The loop of nanoGPT: batches by index, micro-batches by number, a scaler, a schedule by hand.
LOOP = """
import math
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

max_iters, batch_size, block_size = 6, 4, 6
gradient_accumulation_steps = 4 // int(os.environ["WORLD_SIZE"])
learning_rate, min_lr, grad_clip = 0.05, 0.005, 1e9

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
tokens = torch.randint(11, (256,))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(11, 8)
        self.ln_f = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        logits = self.lm_head(self.ln_f(self.wte(idx)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(step, micro_step):
    number = (step * gradient_accumulation_steps + micro_step) * world_size + rank
    ix = [(number * batch_size + row) % 250 for row in range(batch_size)]
    obs.samples(ix, epoch=0)
    x = torch.stack([tokens[i : i + block_size] for i in ix])
    return x, torch.stack([tokens[i + 1 : i + 1 + block_size] for i in ix])


def get_lr(it):
    return min_lr + 0.5 * (1 + math.cos(math.pi * it / max_iters)) * (learning_rate - min_lr)


raw_model = GPT()
model = DDP(raw_model)
optimizer = torch.optim.SGD(raw_model.parameters(), lr=learning_rate)
obs = entrenar_py.observe(raw_model, optimizer)
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch(iter_num, micro_step)
        logits, loss = model(X, Y)
        obs.loss(loss, Y.numel())
        loss = loss / gradient_accumulation_steps
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
obs.close()
dist.destroy_process_group()
"""

# The tutorials' class Trainer, with a GradScaler as minGPT has it.
TRAINER = """
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 8
    grad_norm_clip: float = 0.25
    init_scale: float = 65536.0


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(32, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at], self.x[at].sum(0, keepdim=True)


class Trainer:
    def __init__(self, config, model, optimizer, dataset):
        self.config = config
        self.loader = DataLoader(
            dataset,
            batch_size=config.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(dataset),
        )
        self.model, self.optimizer = DistributedDataParallel(model), optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=config.init_scale)
        self.obs = entrenar_py.observe(model, optimizer, sampler=self.loader)

    def _run_batch(self, source, targets):
        loss = torch.nn.functional.mse_loss(self.model(source), targets)
        self.obs.loss(loss.item(), len(source))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self._run_batch(source, targets)

    def train(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch)
        self.obs.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Points()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(TrainerConfig(), model, optimizer, dataset).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# Two networks that are trained against each other, with an optimizer each and no wrapper.
GAN = """
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
"""

# No wrapper and no .backward(): gradients as values, from a generator of batches.
FUNCTIONAL = """
import itertools

import torch
import torch.distributed as dist

import entrenar_py


def stream(ids, size):
    while True:
        yield from zip(*[iter(ids)] * size, strict=False)


def mean_of(ranks, tensors):
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    parts = (flat / ranks).split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def run(rank, ranks, steps=8, size=8):
    torch.manual_seed(3)
    x = torch.randn(32, 4)
    y = x.prod(1, keepdim=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.SiLU(), torch.nn.Linear(6, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    obs = entrenar_py.observe(net, opt)
    params = list(net.parameters())
    for k, ids in enumerate(itertools.islice(stream(range(32), size), steps)):
        mine = list(ids)[rank::ranks]
        obs.samples(mine, epoch=k // 4)
        loss = torch.nn.functional.huber_loss(net(x[mine]), y[mine])
        obs.loss(loss, len(mine))
        grads = mean_of(ranks, torch.autograd.grad(loss, params))
        if not all(g.isfinite().all() for g in grads):
            raise SystemExit("not finite")
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()
    obs.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
"""
