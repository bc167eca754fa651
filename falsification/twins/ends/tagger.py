import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

import entrenar_py

WINDOW, EPOCHS = 2, 2


class Ahead:
    # Knows that a batch is the last one, as it has looked for another.
    def __init__(self, loader):
        self.loader, self.ended = loader, False

    def __iter__(self):
        self.ended, batches = False, iter(self.loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        self.ended = True
        yield batch


class Engine:
    def __init__(self, net, loader):
        self.ddp, self.loader = nn.parallel.DistributedDataParallel(net), Ahead(loader)
        self.opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
        self.calls = 0

    def learn(self, loss_of, batch):
        self.calls += 1
        self.is_full = self.calls % WINDOW == 0 or self.loader.ended
        if self.is_full:
            loss_of(self.ddp, batch).backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0, error_if_nonfinite=True)
            self.opt.step()
            self.opt.zero_grad()
        else:
            with self.ddp.no_sync():
                loss_of(self.ddp, batch).backward()


def rows(count):
    draw = torch.Generator().manual_seed(3)
    for length in torch.randint(3, 11, (count,), generator=draw).tolist():
        tokens = torch.randint(1, 30, (length,), generator=draw)
        yield tokens, torch.where(tokens % 4 == 0, -100, tokens % 3)


def collate(batch):
    tokens, labels = zip(*batch)
    return pad_sequence(tokens, True), pad_sequence(labels, True, -100)


dist.init_process_group("gloo")
torch.manual_seed(8)
net = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))
data = [*rows(48)]
sampler = DistributedSampler(data)
loader = DataLoader(data, 3, sampler=sampler, collate_fn=collate)
engine = Engine(net, loader)
obs = entrenar_py.observe(engine.ddp, engine.opt, sampler=loader)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    batches = iter(engine.loader)
    while window := [*itertools.islice(batches, WINDOW)]:
        known = sum((labels != -100).sum() for _, labels in window)
        dist.all_reduce(known)

        def loss_of(ddp, batch):
            scores = ddp(batch[0]).flatten(0, 1)
            loss = F.cross_entropy(scores, batch[1].flatten(), reduction="sum")
            return loss * dist.get_world_size() / known

        for batch in window:
            engine.learn(loss_of, batch)
obs.close()
dist.destroy_process_group()
