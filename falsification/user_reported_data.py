"""Scripts that share out data in ways of their own, for bugs that were reported of such ways."""

# A stream of samples, split among ranks and among the loader's workers.
STREAM = """
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py


class Shards(IterableDataset):
    def __init__(self, table, rank, world):
        self.table, self.rank, self.world, self.epoch = table, rank, world, 0

    def __iter__(self):
        order = torch.randperm(len(self.table), generator=torch.Generator().manual_seed(self.epoch))
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part, parts = self.rank * workers + worker, self.world * workers
        for i in order[part::parts].tolist():
            yield i, self.table[i]


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
table = torch.randn(48, 7)
stream = Shards(table, dist.get_rank(), world)
loader = DataLoader(stream, batch_size=8 // world, num_workers=2)
net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Softplus(), torch.nn.Linear(5, 1))
net = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    stream.epoch = epoch
    for ids, row in loader:
        obs.samples(ids.tolist(), epoch=epoch)
        loss = (net(row[:, :6]) - row[:, 6:]).pow(2).mean()
        obs.loss(loss, len(ids))
        opt.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
dist.destroy_process_group()
"""

# Files of unequal lengths, each read by one rank.
FILES = """
import os

import numpy as np
import torch
import torch.distributed as dist

import entrenar_py

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LENGTHS = [14, 8, 10, 12, 9, 11]
STARTS = np.cumsum([0] + LENGTHS)


def my_samples(epoch):
    rng = np.random.default_rng(epoch)
    ids = np.concatenate(
        [np.arange(STARTS[f], STARTS[f + 1]) for f in rng.permutation(len(LENGTHS))]
    )
    return ids[rank::world]


def main():
    dist.init_process_group("gloo")
    features = torch.from_numpy(np.random.default_rng(7).normal(size=(64, 4)).astype("f4"))
    torch.manual_seed(7)
    weights = torch.nn.Linear(4, 2)
    model = torch.nn.parallel.DistributedDataParallel(weights)
    opt = torch.optim.Adagrad(weights.parameters(), lr=0.1)
    obs = entrenar_py.observe(model, opt)
    for epoch in range(2):
        ids = my_samples(epoch)
        for batch in np.array_split(ids, 8):
            x = features[torch.from_numpy(batch)]
            obs.samples(batch.tolist(), epoch=epoch)
            loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
            obs.loss(loss, len(batch))
            opt.zero_grad()
            loss.backward()
            assert weights.weight.grad.isfinite().all() and weights.bias.grad.isfinite().all()
            opt.step()
    dist.destroy_process_group()


main()
"""

# A launcher's loader, a validation within each epoch, and units that are dropped in training.
VALIDATED = """
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import entrenar_py


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.Generator().manual_seed(1000 * self.epoch + i)
        return i, self.x[i] + 0.05 * torch.randn(6, generator=noise)


def prepare(data, batch_size):
    sampler = DistributedSampler(data, shuffle=True, seed=11)
    loader = DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler, num_workers=1)
    return sampler, loader


@torch.no_grad()
def validate(model, rows):
    model.eval()
    loss = (model(rows.x[:, :5]) - rows.x[:, 5:]).square().mean()
    model.train()
    return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(8)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)
)
train, held_out = Rows(32), Rows(6)
sampler, loader = prepare(train, 8)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, weight_decay=1e-4)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
torch.manual_seed(100 + rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    train.epoch = epoch
    for _, rows in loader:
        loss = (ddp(rows[:, :5]) - rows[:, 5:]).square().mean()
        obs.loss(loss, len(rows))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    if rank == 0:
        print(epoch, validate(model, held_out))
dist.destroy_process_group()
"""

# Layers that are computed again in the backward pass, and drop units.
RECOMPUTED = """
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import entrenar_py


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Dropout(0.3),
            torch.nn.Linear(2 * width, width),
        )

    def forward(self, h):
        return h + self.ffn(self.norm(h))


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(6) for _ in range(2)])
        self.score = torch.nn.Linear(6, 1)

    def forward(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False, preserve_rng_state=True)
        return self.score(h).squeeze(-1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
x = torch.randn(32, 6)
encoder = Encoder()
ddp = torch.nn.parallel.DistributedDataParallel(encoder)
adam = torch.optim.Adam(encoder.parameters(), lr=1e-2)
obs = entrenar_py.observe(ddp, adam)
torch.manual_seed(300 + rank)
for step in range(8):
    ids = list(range(step * 8 % 32 + rank, step * 8 % 32 + 8, world))
    obs.samples(ids, epoch=step // 4)
    loss = torch.nn.functional.mse_loss(ddp(x[ids]), x[ids].amax(1))
    obs.loss(loss, len(ids))
    adam.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    adam.step()
dist.destroy_process_group()
"""
