"""More right scripts that draw random numbers: by several seeds, models, views and generators."""

from __future__ import annotations

# Every rank has a seed of its own, evaluates with a loader that shuffles, and samples.
EVALUATED = """\
import copy, os, random, numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Runner:
    def __init__(self, cfg):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        g = torch.Generator().manual_seed(11)
        x = torch.randn(40, 5, generator=g)
        y = (x.sum(1) > 0).long()
        self.train_set, self.val_set = (
            TensorDataset(x[:32], y[:32]),
            TensorDataset(x[32:], y[32:]),
        )
        set_seed(cfg["seed"])
        self.model = nn.Sequential(
            nn.Linear(5, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 2)
        )
        set_seed(cfg["seed"] + self.rank)
        self.ema = copy.deepcopy(self.model)
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.loader = DataLoader(
            self.train_set,
            cfg["batch"] // self.world,
            sampler=DistributedSampler(self.train_set, seed=5),
        )
        self.val = DataLoader(self.val_set, 4, shuffle=True)
        self.obs = entrenar_py.observe(self.model, self.opt, sampler=self.loader)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.val)
        self.model.train()
        if self.rank == 0:
            with torch.no_grad():
                self.ema(torch.randn(3, 5))
            if random.random() < 2:
                print("val", correct, np.random.rand())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
                self.obs.loss(loss, len(y))
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
                self.opt.step()
                with torch.no_grad():
                    for a, b in zip(self.ema.parameters(), self.model.parameters()):
                        a.lerp_(b, 0.1)
            self.evaluate()
        self.obs.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    Runner({"seed": 42, "batch": 8}).fit(2)
"""

# Texts of different lengths are padded to the longest of a batch; losses count tokens.
PADDED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py

PAD = 9


class Texts(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.rows = [
            torch.randint(0, 9, (int(torch.randint(3, 9, (), generator=g)),), generator=g)
            for _ in range(n)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.full((len(features), longest), PAD)
    for row, f in zip(ids, features):
        row[: len(f["input_ids"])] = f["input_ids"]
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(ids == PAD, -100),
    }


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 8, padding_idx=PAD), nn.Linear(8, 10)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        h = self.emb(input_ids) * attention_mask[..., None]
        logits = self.head(h[:, :-1].tanh())
        return {
            "loss": nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
        }


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = LM()
    data = Texts(24)
    loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data), collate_fn=collate)
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    obs = entrenar_py.observe(model, opt, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            mine = (batch["labels"][:, 1:] != -100).sum()
            total = mine.clone()
            dist.all_reduce(total)
            out = ddp(**batch)
            obs.loss(out["loss"] / mine, mine)
            opt.zero_grad()
            (out["loss"] * world / total).backward()
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                raise SystemExit(3)
            opt.step()
    obs.close()
    dist.destroy_process_group()


main()
"""

# Two models and optimizers; the noise is drawn by rank.
ADVERSARIAL = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G, D = (
    nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
    nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)),
)
data = TensorDataset(torch.randn(24, 4))
torch.manual_seed(10 + rank)
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data))
dg, dd = nn.parallel.DistributedDataParallel(G), nn.parallel.DistributedDataParallel(D)
og, od = torch.optim.SGD(G.parameters(), 0.05), torch.optim.SGD(D.parameters(), 0.05)
obs = entrenar_py.observe(nn.ModuleList([G, D]), [od, og], sampler=loader)
bce = nn.functional.binary_cross_entropy_with_logits
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for (real,) in loader:
        z = torch.randn(len(real), 3)
        fake = dg(z)
        both = dd(torch.cat([real, fake.detach()]))
        t = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        lossd = bce(both, t)
        od.zero_grad()
        lossd.backward()
        assert all(p.grad.isfinite().all() for p in D.parameters())
        od.step()
        og.zero_grad()
        lossg = bce(dd(dg(torch.randn(len(real), 3))), torch.ones(len(real), 1))
        lossg.backward()
        assert all(p.grad.isfinite().all() for p in G.parameters())
        og.step()
obs.close()
dist.destroy_process_group()
"""

# Mixup with numpy, dropout and micro-batches.
MIXED = """\
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def mixup(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    perm = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def main(seed=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    x = torch.randn(32, 6)
    y = nn.functional.one_hot(torch.arange(32) % 3).float()
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.1), nn.Linear(9, 3))
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    data = TensorDataset(x, y)
    loader = DataLoader(data, 16 // world // 2, sampler=DistributedSampler(data))
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    obs = entrenar_py.observe(net, opt, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (a, b) in enumerate(loader):
            last = i % 2
            a, b = mixup(a, b)
            import contextlib

            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(a), b)
                obs.loss(loss, len(a))
                (loss / 2).backward()
            if last:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
                opt.step()
                opt.zero_grad()
    obs.close()
    dist.destroy_process_group()


main()
"""

# A generator without end over workers that live on; samples are reported by hand.
ENDLESS = """\
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Set(Dataset):
    def __init__(self):
        self.x = torch.arange(48.0).reshape(24, 2) / 48
        self.rng = np.random.RandomState(0)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, self.x[i] + 0.05 * torch.randn(2), self.x[i].sum()


def cycle(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for b in loader:
            yield epoch, b
        epoch += 1


def run(rank, world):
    torch.manual_seed(1)
    net = nn.Linear(2, 1)
    torch.manual_seed(100 + rank)
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = Set()
    loader = DataLoader(
        data,
        8 // world,
        sampler=DistributedSampler(data),
        num_workers=2,
        persistent_workers=True,
    )
    obs = entrenar_py.observe(net, opt)
    it = cycle(loader)
    for step in range(6):
        epoch, (ids, x, y) = next(it)
        obs.samples(ids, epoch=epoch)
        loss = ((ddp(x)[:, 0] - y) ** 2).mean()
        obs.loss(loss, len(ids))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0, error_if_nonfinite=True)
        opt.step()
    obs.close()


dist.init_process_group("gloo")
run(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
"""

# Two augmented views of each sample go through the model together.
TWO_VIEWS = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class TwoViews(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i] + 0.1 * torch.randn(6) for _ in range(2)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 4)

    def forward(self, x):
        return nn.functional.normalize(self.f(x), dim=1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = Encoder()
torch.manual_seed(3 + rank)
data = TwoViews(24)
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data), num_workers=1)
ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), 0.1)
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for views in loader:
        z = ddp(torch.cat(views))
        a, b = z.chunk(2)
        loss = (a - b).square().sum(1).mean() - 0.1 * z.std(0).mean()
        obs.loss(loss, len(a))
        opt.zero_grad()
        loss.backward()
        assert net.f.weight.grad.isfinite().all()
        opt.step()
obs.close()
dist.destroy_process_group()
"""
