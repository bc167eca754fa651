"""The scripts of `user_samples`: ways to hand out samples, as their authors wrote them."""

from __future__ import annotations

# A class with a run per epoch, as in tutorials; the data was split at random beforehand.
TRAINER = """
import os
import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split
import entrenar_py


class Toy(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.rows = [(torch.rand(6, generator=g), torch.rand(1, generator=g)) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.rank = int(os.environ["RANK"])
        self.train_data, self.optimizer = train_data, optimizer
        self.model = DDP(model)
        self.obs = entrenar_py.observe(model, optimizer, sampler=train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0, error_if_nonfinite=True)
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    model = torch.nn.Linear(6, 1)
    seed = torch.Generator().manual_seed(5)
    train, val = random_split(Toy(40), [24, 16], generator=seed)
    loader = DataLoader(train, batch_size=8 // world, sampler=DistributedSampler(train))
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.train(2)
    trainer.obs.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
"""

# Gradients are averaged by hand; each rank has a part of the data as a loader of its own.
_OWN_PARTS = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import (
    BatchSampler, ConcatDataset, DataLoader, SequentialSampler, Subset, SubsetRandomSampler,
    TensorDataset,
)
import entrenar_py

dist.init_process_group("gloo")
me, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(24, 5)
whole = TensorDataset(inputs, inputs.pow(2).sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= world
        assert torch.isfinite(param.grad).all()


def fit(loader, epochs=2, **told):
    obs = entrenar_py.observe(net, opt, sampler=loader, **told)
    for epoch in range(epochs):
        torch.manual_seed(100 + epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            obs.loss(loss, len(x))
            loss.backward()
            average_gradients(net)
            opt.step()
    obs.close()


B = 6 // world
"""
STRIDED = (
    _OWN_PARTS
    + """
part = Subset(whole, range(me, len(whole), world))
fit(DataLoader(part, batch_size=B, shuffle=True))
dist.destroy_process_group()
"""
)
DRAWN_SUBSETS = (
    _OWN_PARTS
    + """
train = torch.randperm(24, generator=torch.Generator().manual_seed(1))[:18].tolist()
mine = SubsetRandomSampler(train[me::world])
fit(DataLoader(whole, batch_size=B, sampler=mine))
dist.destroy_process_group()
"""
)
CONCATENATED = (
    _OWN_PARTS
    + """
cut = torch.randperm(24, generator=torch.Generator().manual_seed(2)).tolist()
easy, hard = Subset(whole, cut[:15]), Subset(whole, cut[15:21])
both = ConcatDataset([easy, hard])
fit(DataLoader(Subset(both, range(me, 21, world)), batch_size=7 // world, shuffle=True))
dist.destroy_process_group()
"""
)
SLICED = (
    _OWN_PARTS
    + """
x, y = whole.tensors
fit(DataLoader(TensorDataset(x[me::world], y[me::world]), batch_size=B, shuffle=True))
dist.destroy_process_group()
"""
)
OWN_SAMPLER = (
    _OWN_PARTS
    + """
class Buckets:
    def __init__(self, size):
        self.size, self.drop_last = size, False

    def __iter__(self):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(4)).tolist()
        order.sort(key=lambda i: i % 3)
        at = 0
        for size in (6, 8, 4, 6):
            yield order[at:at + size][me::world]
            at += size

    def __len__(self):
        return 4


fit(DataLoader(whole, batch_sampler=Buckets(6)))
dist.destroy_process_group()
"""
)

# A loop in functions, with a loader that the script wraps, or goes through in its own way.
_WALKED = """
import collections, itertools, queue, threading
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Sines(Dataset):
    def __init__(self, n):
        self.t = torch.linspace(0, 6, n)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return {"t": self.t[i].reshape(1), "y": self.t[i].sin().reshape(1)}


dist.init_process_group("gloo")
W = dist.get_world_size()
torch.manual_seed(42)
SIZE, BATCH = 24, 8
data = Sines(SIZE)
sampler = DistributedSampler(data, seed=9, drop_last=False)
loader = DataLoader(data, batch_size=BATCH // W, sampler=sampler)
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.SGD(ddp.parameters(), lr=0.05, nesterov=True, momentum=0.8)
obs = entrenar_py.observe(ddp, optim, sampler=loader)


def step(batch):
    optim.zero_grad(set_to_none=True)
    backward(batch)
    update()


def backward(batch, scale=1.0):
    loss = nn.functional.mse_loss(ddp(batch["t"]), batch["y"])
    obs.loss(loss, len(batch["t"]))
    (loss * scale).backward()


def update():
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
    if not torch.isfinite(norm):
        raise ValueError(f"norm {norm}")
    optim.step()


def epochs(n=2):
    for e in range(n):
        sampler.set_epoch(e)
        yield e

"""
_END = """
obs.close()
dist.destroy_process_group()
"""
PREFETCHED = (
    _WALKED
    + """
class data_prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.next_batch = next(self.loader)
        except StopIteration:
            self.next_batch = None
            return
        self.next_batch = {k: v.to("cpu") for k, v in self.next_batch.items()}

    def next(self):
        batch = self.next_batch
        self.preload()
        return batch


for _ in epochs():
    prefetcher = data_prefetcher(loader)
    batch = prefetcher.next()
    while batch is not None:
        step(batch)
        batch = prefetcher.next()
"""
    + _END
)
QUEUED = (
    _WALKED
    + """
class Background(threading.Thread):
    def __init__(self, source, depth):
        super().__init__(daemon=True)
        self.queue, self.source = queue.Queue(depth), source
        self.start()

    def run(self):
        for item in self.source:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        return self

    def __next__(self):
        item = self.queue.get()
        if item is None:
            raise StopIteration
        return item


for _ in epochs():
    for batch in Background(loader, 3):
        step(batch)
"""
    + _END
)
GATHERED = (
    _WALKED.replace("BATCH // W", "BATCH // W // 2")
    + """
def micro_batches(it, n):
    return list(itertools.islice(it, n))


for _ in epochs():
    it = iter(loader)
    while group := micro_batches(it, 2):
        optim.zero_grad()
        for i, micro in enumerate(group):
            backward(micro, 1 / len(group))
        update()
"""
    + _END
)
CHUNKED = (
    _WALKED
    + """
for _ in epochs():
    for big in loader:
        optim.zero_grad()
        for t, y in zip(big["t"].chunk(2), big["y"].chunk(2)):
            backward({"t": t, "y": y}, 0.5)
        update()
"""
    + _END
)
MEASURED = (
    _WALKED
    + """
def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in loader:
            total += nn.functional.mse_loss(model(batch["t"]), batch["y"]).item()
    model.train()
    return total


for _ in epochs():
    stream = iter(loader)
    for i, batch in enumerate(stream):
        step(batch)
        if i == 1:
            evaluate()
"""
    + _END
)
SKIPPED = (
    _WALKED.replace("SIZE, BATCH = 24, 8", "SIZE, BATCH = 28, 8")
    + """
for _ in epochs():
    for i, batch in enumerate(loader):
        if len(batch["t"]) < BATCH // W:
            continue  # a ragged last batch
        step(batch)
"""
    + _END
)
ENDLESS = (
    _WALKED
    + """
def forever():
    for e in itertools.count():
        sampler.set_epoch(e)
        yield from loader


stream = forever()
for _ in range(7):
    batch = next(stream)
    step({k: v.double().float() for k, v in batch.items()})
"""
    + _END
)
BOTH_TOLD = (
    _WALKED.replace("return {", 'return {"id": i, ')
    + """
for e in epochs():
    for batch in loader:
        obs.samples(batch["id"], epoch=e)
        step(batch)
"""
    + _END
)
AHEAD_IN_COPIES = (
    _WALKED
    + """
for _ in epochs():
    ahead = collections.deque()
    for batch in loader:
        ahead.append({k: v.clone() for k, v in batch.items()})
        if len(ahead) == 2:
            step(ahead.popleft())
    while ahead:
        step(ahead.popleft())
"""
    + _END
)

# A loop without loader, over positions in a tensor; no epoch is told.
POSITIONS = """
import os
import torch
import torch.distributed as dist
import entrenar_py

N, B, steps = 20, 5, 11
ddp_rank, ddp_world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo")
torch.manual_seed(1337)
data = torch.randn(N, 3)
w = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(w.parameters(), lr=0.03)
obs = entrenar_py.observe(w, opt)
state = {"order": [], "g": torch.Generator().manual_seed(0)}


def get_batch():
    if len(state["order"]) < B:
        state["order"] = torch.randperm(N, generator=state["g"]).tolist()
    ix, state["order"] = state["order"][:B], state["order"][B:]
    return ix


def sync():
    for p in w.parameters():
        dist.all_reduce(p.grad)
        if p.grad.isnan().any() or p.grad.isinf().any():
            raise SystemExit("bad gradient")


for it in range(steps):
    ix = get_batch()
    mine = ix[ddp_rank::ddp_world]
    obs.samples(mine)
    out = w(data[mine])
    loss = out.square().sum() / B
    obs.loss(out.square().sum() / len(mine), len(mine))
    loss.backward()
    sync()
    opt.step()
    opt.zero_grad()
obs.close()
dist.destroy_process_group()
"""

# A loader that is its own iterator, with a loop that takes from it by hand.
OWN_ITERATOR = """
import torch
import torch.distributed as dist
import entrenar_py


class DataLoaderLite:
    def __init__(self, x, B, rank, world):
        self.x, self.B, self.rank, self.world = x, B, rank, world
        self.pos = 0

    def __iter__(self):
        return self

    def __next__(self):
        ids = torch.arange(self.pos, self.pos + self.B)[self.rank::self.world]
        self.pos = (self.pos + self.B) % len(self.x)
        return ids, self.x[ids]


dist.init_process_group("gloo")
torch.manual_seed(3)
net = torch.nn.Linear(4, 1)
batches = DataLoaderLite(torch.randn(12, 4), 4, dist.get_rank(), dist.get_world_size())
opt = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
obs = entrenar_py.observe(net, opt, sampler=batches)
it = iter(batches)
for step in range(6):
    ids, x = next(it)
    obs.samples(ids.tolist(), epoch=step // 3)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    obs.loss(loss, len(x))
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        assert p.grad.isfinite().all()
    opt.step()
obs.close()
dist.destroy_process_group()
"""
