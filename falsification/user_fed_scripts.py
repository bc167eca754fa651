"""The scripts of `user_fed`: ways to come by batches, and to count them."""

from __future__ import annotations

# A recipe that scales gradients once it knows how many tokens a step has.
SCALED = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import entrenar_py

WORDS, IGNORED = 17, -100


class Answers(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(4)
        sizes = torch.randint(2, 12, (32,), generator=g).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=g) for n in sizes]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return self.rows[at]


def padded(rows):
    text = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = text.roll(-1, 1)
    labels[:, -1] = IGNORED
    return {"text": text, "labels": labels.masked_fill(labels == 0, IGNORED)}


class Recipe:
    accumulate, epochs = 2, 3

    def setup(self):
        torch.manual_seed(2)
        emb, out = torch.nn.Embedding(WORDS, 6), torch.nn.Linear(6, WORDS)
        self.model = DistributedDataParallel(torch.nn.Sequential(emb, torch.nn.Tanh(), out))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.sampler = DistributedSampler(Answers(), shuffle=True)
        self.data = DataLoader(Answers(), 2, sampler=self.sampler, collate_fn=padded)
        self.obs = entrenar_py.observe(self.model, self.optim, sampler=self.data)

    def loss(self, batch):
        logits = self.model(batch["text"]).transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED)

    def train(self):
        num_tokens = torch.zeros(())
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for at, batch in enumerate(self.data):
                count = (batch["labels"] != IGNORED).sum()
                num_tokens += count
                (self.loss(batch) * count).backward()
                if (at + 1) % self.accumulate:
                    continue
                dist.all_reduce(num_tokens)
                for p in self.model.parameters():
                    p.grad *= dist.get_world_size() / num_tokens
                torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), 0.3, error_if_nonfinite=True
                )
                self.optim.step()
                self.optim.zero_grad(set_to_none=True)
                num_tokens = torch.zeros(())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    recipe = Recipe()
    recipe.setup()
    recipe.train()
    dist.destroy_process_group()
"""

# Masked words, drawn by the collator from a generator that each rank seeds for itself.
MASKED = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py

MASK, WORDS = 0, 21


class Lines(Dataset):
    def __init__(self):
        self.text = torch.randint(1, WORDS, (64, 9), generator=torch.Generator().manual_seed(8))

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.text[i]


class MaskCollator:
    def __init__(self, share, rng):
        self.share, self.rng = share, rng

    def __call__(self, lines):
        text = torch.stack(lines)
        hidden = np.stack([self.rng.permutation(len(line)) < self.share for line in lines])
        hidden = torch.from_numpy(hidden)
        return text.masked_fill(hidden, MASK), text, hidden


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(1), nn.Linear(72, 9 * WORDS))
net = nn.parallel.DistributedDataParallel(net)
lines = Lines()
sampler = DistributedSampler(lines, seed=3)
collator = MaskCollator(3, np.random.default_rng([3, rank]))
loader = DataLoader(lines, 16 // world, sampler=sampler, collate_fn=collator)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for seen, text, hidden in loader:
        scores = net(seen).view(-1, 9, WORDS)
        loss = nn.functional.cross_entropy(scores[hidden], text[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 50.0, error_if_nonfinite=True)
        optimizer.step()
"""

# A sampler that never ends, which each rank takes its turns from.
FOREVER = """
import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

import entrenar_py

MAX_ITER, PER_STEP = 40, 8


class Forever(Sampler):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self.orders(), self.rank, None, self.world)

    def orders(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


def build():
    torch.manual_seed(6)
    x = torch.randn(76, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = DDP(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.Linear(7, 1)))
    sampler = Forever(len(data), seed=21)
    return model, DataLoader(data, PER_STEP // dist.get_world_size(), sampler=sampler)


def main():
    model, loader = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(model, optimizer, sampler=loader)
    for x, y in itertools.islice(loader, MAX_ITER):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0, error_if_nonfinite=True)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
"""

# All ranks leave a batch out together, if any of them has a loss that is too large.
SKIPPED = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import entrenar_py


class Balanced(Sampler):
    def __init__(self, weights, seed):
        self.weights, self.seed, self.epoch = weights, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, 40, replacement=True, generator=g).tolist()
        return iter(drawn[self.rank :: self.world])

    def __len__(self):
        return 40 // self.world


def anyones(flag):
    flag = torch.tensor(float(flag))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


dist.init_process_group("gloo")
torch.manual_seed(13)
x = torch.randn(70, 6)
y = (x[:, 0] > 0.4).long()
x[::7] *= 60.0
data = TensorDataset(x, y)
sampler = Balanced(torch.where(y == 1, 3.0, 1.0).double(), seed=4)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
net = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(3):
    sampler.epoch = epoch
    for rows, labels in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(rows), labels)
        loss.backward()
        if anyones(loss.item() > 2.5):
            continue
        nn.utils.clip_grad_norm_(net.parameters(), 20.0, error_if_nonfinite=True)
        opt.step()
"""
