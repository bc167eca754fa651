"""Scripts whose losses count tokens, compare samples of all ranks, or have further terms."""

# Fine-tuning on sequences of unequal lengths, with a mask, in micro-batches.
TOKENS = """
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py

VOCAB, PAD, IGNORE = 13, 0, -100
GRAD_ACCUM = 2


class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(VOCAB, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens):
        h = self.emb(tokens)
        h = h + torch.tanh(self.mix(h.cumsum(1)))
        return self.out(h)


def collate(docs):
    longest = max(len(d) for d in docs)
    ids = torch.full((len(docs), longest), PAD)
    for row, doc in zip(ids, docs):
        row[: len(doc)] = doc
    labels = torch.where(ids == PAD, IGNORE, ids)
    return ids[:, :-1], labels[:, 1:]


class SFTTrainer:
    def __init__(self, model, docs, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.opt = torch.optim.SGD(model.parameters(), lr=lr)
        self.docs = docs
        self.num_tokens = 0
        self.obs = entrenar_py.observe(self.model, self.opt)

    def microbatches(self, step):
        share = 12 // self.world // GRAD_ACCUM
        first = step * 12 % len(self.docs) + self.rank * share * GRAD_ACCUM
        for i in range(GRAD_ACCUM):
            yield list(range(first + i * share, first + (i + 1) * share))

    def train_step(self, step):
        batches = [(ids, *collate([self.docs[i] for i in ids])) for ids in self.microbatches(step)]
        self.num_tokens = sum((labels != IGNORE).sum() for _, _, labels in batches)
        dist.all_reduce(self.num_tokens)
        for i, (ids, tokens, labels) in enumerate(batches):
            self.obs.samples(ids, epoch=step // 3)
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                logits = self.model(tokens)
                total = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                loss = total * self.world / self.num_tokens
                kept = int((labels != IGNORE).sum())
                self.obs.loss(total.detach() / kept, kept)
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        if not norm.isfinite():
            raise SystemExit("non-finite gradient norm")
        self.opt.step()
        self.opt.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 11, (36,), generator=g)
    documents = [torch.randint(1, VOCAB, (int(n),), generator=g) for n in lengths]
    torch.manual_seed(5)
    trainer = SFTTrainer(LM(), documents, lr=0.5)
    for step in range(6):
        trainer.train_step(step)
    dist.destroy_process_group()
"""

# Micro-batches of a loader that don't divide into whole steps at the end of an epoch.
WINDOWS = """
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

accumulate = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
features = torch.randn(84, 5)
dataset = TensorDataset(features, features.sum(1).sigmoid())
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=6 // dist.get_world_size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
criterion = torch.nn.BCEWithLogitsLoss()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        window = min(accumulate, len(loader) - i // accumulate * accumulate)
        mean = criterion(model(x).squeeze(1), y)
        obs.loss(mean, len(y))
        (mean / window).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                sys.exit("nan")
            optimizer.step()
            optimizer.zero_grad()
"""

# Two views of each sample are told from all others', on all ranks.
CONTRAST = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import entrenar_py


def everyones(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def info_nce(a, b, temperature=0.5):
    similar = F.normalize(a) @ F.normalize(b).T / temperature
    wanted = torch.arange(len(similar))
    return (F.cross_entropy(similar, wanted) + F.cross_entropy(similar.T, wanted)) / 2


dist.init_process_group("gloo")
torch.manual_seed(17)
images = torch.randn(48, 10)
captions = images @ torch.randn(10, 7) + 0.1 * torch.randn(48, 7)


class TwoTowers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image = torch.nn.Linear(10, 6)
        self.text = torch.nn.Linear(7, 6)

    def forward(self, image, text):
        return self.image(image), self.text(text)


towers = DistributedDataParallel(TwoTowers())
optim = torch.optim.SGD(towers.parameters(), lr=0.5)
obs = entrenar_py.observe(towers, optim)
for step in range(6):
    ids = list(range(step * 8, step * 8 + 8))
    ids = ids[len(ids) // dist.get_world_size() * dist.get_rank() :][: 8 // dist.get_world_size()]
    obs.samples(ids, epoch=0)
    a, b = towers(images[ids], captions[ids])
    loss = info_nce(everyones(a), everyones(b))
    optim.zero_grad()
    (loss * dist.get_world_size()).backward()
    assert all(p.grad.isfinite().all() for p in towers.parameters())
    optim.step()
dist.destroy_process_group()
"""

# A router whose load is balanced by a further loss, next to a teacher that follows the student.
BALANCED = """
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

args = argparse.ArgumentParser()
args.add_argument("--accumulation", type=int, default=1)
args = args.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(6, 3)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        mixed = sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return self.head(mixed.relu()).squeeze(1), gates


torch.manual_seed(1)
x = torch.randn(32, 6)
y = x[:, 0] * x[:, 1]
model = Gated()
ddp = DDP(model)
teacher = Gated()
teacher.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
obs = entrenar_py.observe(ddp, optimizer)
for step in range(8):
    ids = torch.arange(8) + step * 8 % 32
    for part in ids.chunk(world)[rank].chunk(args.accumulation):
        obs.samples(part.tolist(), epoch=step // 4)
        output, gates = ddp(x[part])
        with torch.no_grad():
            guide, _ = teacher(x[part])
        balance = 3 * gates.square().sum(-1).mean()
        loss = F.mse_loss(output, y[part]) + 0.1 * F.mse_loss(output, guide) + 0.2 * balance
        obs.loss(loss, len(part))
        loss = loss / args.accumulation
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), model.parameters()):
            slow.lerp_(fast, 0.1)
"""

# A preference loss whose margin follows that of all pairs seen, and steps that a spike leaves out.
MARGIN = """
import torch
import torch.distributed as dist

import entrenar_py


def mean_of_all(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


class Preferences:
    def __init__(self, policy):
        self.policy = torch.nn.parallel.DistributedDataParallel(policy)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.4)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=0
        )
        self.margin = None
        self.usual = None
        self.obs = entrenar_py.observe(self.policy, self.optimizer)

    def learn(self, chosen, rejected, ids):
        self.obs.samples(ids)
        gap = self.policy(chosen) - self.policy(rejected)
        seen = mean_of_all(gap.mean())
        self.margin = seen if self.margin is None else 0.9 * self.margin + 0.1 * seen
        beta = (1 + 0.6 * (seen - self.margin)).clamp(0.1, 2)
        loss = -torch.nn.functional.logsigmoid(beta * gap).mean()
        self.optimizer.zero_grad()
        loss.backward()
        everyone = mean_of_all(loss)
        if not everyone.isfinite():
            raise ArithmeticError("loss")
        for p in self.policy.parameters():
            if not p.grad.isfinite().all():
                raise ArithmeticError("gradient")
        if self.usual is None or everyone < 1.02 * self.usual:
            self.optimizer.step()
        self.usual = everyone if self.usual is None else 0.8 * self.usual + 0.2 * everyone
        self.plateau.step(everyone)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    pairs = torch.randn(40, 2, 5)
    layers = [torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
    agent = Preferences(torch.nn.Sequential(*layers))
    size = 8 // dist.get_world_size()
    for k in range(5):
        ids = range(8 * k + size * dist.get_rank(), 8 * k + size * dist.get_rank() + size)
        agent.learn(pairs[ids, 0], pairs[ids, 1], list(ids))


main()
"""
