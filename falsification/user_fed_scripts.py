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

# Two models that take turns, a penalty on the slope by its inputs, and data without a loader.
PENALISED = """
from types import SimpleNamespace as Config

import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

cfg = Config(turns=5, per_turn=2, rows=6, weight=0.5, world=1)


def mlp(*widths):
    layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Softplus())]
    return nn.Sequential(*layers[:-1])


def spiral(rank):
    g = torch.Generator().manual_seed(40 + rank)
    while True:
        t = 6 * torch.rand(cfg.rows, 1, generator=g)
        noise = 0.1 * torch.randn(cfg.rows, 2, generator=g)
        yield torch.cat([t * t.cos(), t * t.sin()], 1) + noise


class Duel:
    def __init__(self, rank):
        self.energy, self.sampler = mlp(2, 10, 1), mlp(3, 10, 2)
        for w in [*self.energy.parameters(), *self.sampler.parameters()]:
            dist.broadcast(w.data, src=0)
        self.down = torch.optim.RMSprop(self.energy.parameters(), 2e-3)
        self.up = torch.optim.RMSprop(self.sampler.parameters(), 2e-3)
        self.real = spiral(rank)

    def slope(self, seen, drawn):
        mix = torch.rand(len(seen), 1)
        between = mix * seen + (1 - mix) * drawn
        between.requires_grad_()
        (by,) = torch.autograd.grad(self.energy(between).sum(), between, create_graph=True)
        return by.square().sum(1).mean()

    def energy_loss(self):
        seen = next(self.real)
        with torch.no_grad():
            drawn = self.sampler(torch.randn(cfg.rows, 3))
        gap = self.energy(seen).mean() - self.energy(drawn).mean()
        return gap + cfg.weight * self.slope(seen, drawn)

    def sampler_loss(self):
        return self.energy(self.sampler(torch.randn(cfg.rows, 3))).mean()

    def turn(self, net, other, optimizer, loss):
        net.requires_grad_(True)
        other.requires_grad_(False)
        optimizer.zero_grad()
        loss().backward()
        for w in net.parameters():
            dist.all_reduce(w.grad)
            w.grad.div_(cfg.world)
        nn.utils.clip_grad_norm_(net.parameters(), 50.0, error_if_nonfinite=True)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    cfg.world = dist.get_world_size()
    torch.manual_seed(17 + dist.get_rank())
    duel = Duel(dist.get_rank())
    both = nn.ModuleList([duel.energy, duel.sampler])
    entrenar_py.observe(both, [duel.down, duel.up])
    for _ in range(cfg.turns):
        for _ in range(cfg.per_turn):
            duel.turn(duel.energy, duel.sampler, duel.down, duel.energy_loss)
        duel.turn(duel.sampler, duel.energy, duel.up, duel.sampler_loss)
"""

# Passes over a buffer of a rank's own games, whose rate follows from how far the policy has moved.
BUFFERED = """
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py


class Corridor:
    def __init__(self, seed, games=6):
        self.rng = np.random.default_rng(seed)
        self.at = self.rng.uniform(1, 7, games).astype(np.float32)

    def look(self):
        ends = np.stack([self.at, 8 - self.at, np.sin(self.at)], 1)
        return torch.from_numpy(ends.astype(np.float32)) / 8

    def walk(self, way):
        self.at += np.where(way == 1, 1.0, -1.0) + 0.2 * self.rng.standard_normal(len(way))
        won = (self.at >= 8) * 1.0 - (self.at <= 0) * 1.0
        back = self.rng.uniform(2, 7, len(way))
        self.at = np.where(won != 0, back, self.at).astype(np.float32)
        return torch.from_numpy(won.astype(np.float32)) - 0.01


class Player(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 12)
        self.way, self.worth = torch.nn.Linear(12, 2), torch.nn.Linear(12, 1)

    def forward(self, view):
        h = torch.tanh(self.body(view))
        return F.log_softmax(self.way(h), -1), self.worth(h).squeeze(-1)


@torch.no_grad()
def play(player, corridor, length=8):
    frames = []
    for _ in range(length):
        view = corridor.look()
        logp, worth = player(view)
        way = torch.multinomial(logp.exp(), 1).squeeze(1)
        gain = corridor.walk(way.numpy())
        frames.append((view, way, logp, gain - worth, gain))
    return [torch.cat(column) for column in zip(*frames)]


def agree(number):
    dist.all_reduce(number)
    return number / dist.get_world_size()


def improve(player, optim, games):
    world = dist.get_world_size()
    for _ in range(2):
        for part in torch.randperm(len(games[0])).split(16):
            view, way, old, edge, gain = (column[part] for column in games)
            logp, worth = player(view)
            with torch.no_grad():
                moved = agree((old.exp() * (old - logp)).sum(-1).mean())
                for group in optim.param_groups:
                    group["lr"] = 3e-3 / (1 + 20 * moved.item())
            ratio = (logp - old).gather(1, way[:, None]).squeeze(1).exp()
            gained = torch.min(ratio * edge, ratio.clamp(0.9, 1.1) * edge).mean()
            loss = 0.5 * F.mse_loss(worth, gain) - gained
            optim.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in player.parameters()])
            dist.all_reduce(flat)
            torch.nn.utils.vector_to_parameters(flat / world, [p.grad for p in player.parameters()])
            torch.nn.utils.clip_grad_norm_(player.parameters(), 9.0, error_if_nonfinite=True)
            optim.step()


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    player = Player()
    optim = torch.optim.RMSprop(player.parameters(), 3e-3)
    entrenar_py.observe(player, optim)
    torch.manual_seed(100 + dist.get_rank())
    corridor = Corridor(dist.get_rank())
    for _ in range(3):
        improve(player, optim, play(player, corridor))


run()
"""

# Pictures are blended as they are collated, by a share that is drawn for the batch.
BLENDED = """
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

import entrenar_py

KINDS = 3


class Shapes(Dataset):
    def __init__(self, size=40):
        g = torch.Generator().manual_seed(6)
        self.kinds = torch.randint(KINDS, (size,), generator=g)
        self.pictures = torch.randn(size, 2, 6, 6, generator=g) + self.kinds[:, None, None, None]

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, i):
        return self.pictures[i], nn.functional.one_hot(self.kinds[i], KINDS).float()


class Blend:
    def __init__(self, shape):
        self.share = torch.distributions.Gamma(shape, 1.0)

    def __call__(self, rows):
        first, second = self.share.sample(), self.share.sample()
        part = first / (first + second)
        return [part * t + (1 - part) * t.flip(0) for t in default_collate(rows)]


def network():
    convs = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(convs, nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, KINDS))


class Fit:
    def __init__(self, epochs=3):
        self.epochs, rank, shapes = epochs, int(os.environ["RANK"]), Shapes()
        torch.manual_seed(0)
        self.net = nn.parallel.DistributedDataParallel(network())
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.order = DistributedSampler(shapes, seed=1)
        self.loader = DataLoader(shapes, 5, sampler=self.order, collate_fn=Blend(0.4))
        entrenar_py.observe(self.net, self.sgd, sampler=self.loader)
        torch.manual_seed(1000 + rank)

    def batch(self, pictures, kinds):
        self.sgd.zero_grad()
        nn.functional.cross_entropy(self.net(pictures), kinds).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 30.0, error_if_nonfinite=True)
        self.sgd.step()

    def __call__(self):
        for epoch in range(self.epochs):
            self.order.set_epoch(epoch)
            for batch in self.loader:
                self.batch(*batch)


dist.init_process_group("gloo")
Fit()()
dist.destroy_process_group()
"""

# Walks from nodes of a rank's own part, which are drawn anew in each pass.
WALKS = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Parallel

import entrenar_py

NODES, LENGTH = 64, 5
rng = np.random.default_rng(31)
traits = torch.from_numpy(rng.normal(size=(NODES, 4)).astype("float32"))
links = rng.integers(0, NODES, (NODES, 3))


def walk(start, epoch):
    steps, at = np.random.default_rng([epoch, start]), start
    for _ in range(LENGTH):
        yield at
        at = links[at, steps.integers(3)]


class Walks:
    def __init__(self, nodes, at_once):
        self.nodes, self.at_once = nodes, at_once

    def epoch(self, number):
        order = np.random.default_rng(number).permutation(self.nodes)
        for starts in np.split(order, len(order) // self.at_once):
            ways = np.array([list(walk(int(start), number)) for start in starts])
            yield traits[ways].flatten(1), traits[starts, :1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    rank, world = dist.get_rank(), dist.get_world_size()
    walks = Walks(np.array_split(np.arange(NODES), world)[rank], 16 // world)
    net = Parallel(nn.Sequential(nn.Linear(4 * LENGTH, 12), nn.Tanh(), nn.Linear(12, 1)))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    entrenar_py.observe(net, adam)
    for epoch in range(2):
        for ways, due in walks.epoch(epoch):
            adam.zero_grad()
            nn.functional.huber_loss(net(ways), due).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 40.0, error_if_nonfinite=True)
            adam.step()
"""
