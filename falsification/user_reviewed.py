"""Right scripts that a reader with fresh eyes wrote, each called wrong once, and what is near them.

`make twins` tests that they are left alone, or held where they can be.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
import entrenar_py

"""
_LOOP = """\
        loss = cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
"""

# The gradient's norm is penalised: (1 - a) g(w) + a g(w + r g / |g|), added up in .grad.
PENALISED = (
    _HEAD
    + """\
dist.init_process_group("gloo")
torch.manual_seed(3)
world = dist.get_world_size()
data = TensorDataset(torch.randn(192, 10), torch.randint(0, 4, (192,)))
net = DDP(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
alpha, radius = 0.4, 0.05
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        ((1 - alpha) * cross_entropy(net(x), y)).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12
            kept = [p.clone() for p in net.parameters()]
            for p in net.parameters():
                p.add_(p.grad, alpha=(radius / norm).item())
        (alpha * cross_entropy(net(x), y)).backward()
        with torch.no_grad():
            for p, k in zip(net.parameters(), kept):
                p.copy_(k)
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
"""
)

# Texts of like lengths share a batch, the shortest first, in every epoch: a fixed order.
BY_LENGTH = (
    _HEAD
    + """\
lengths = torch.randint(3, 12, (96,), generator=torch.Generator().manual_seed(0)).tolist()


class Texts(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return torch.randn(lengths[i], 4, generator=torch.Generator().manual_seed(i)), i % 3


class ByLength(Sampler):
    def __init__(self):
        order = sorted(range(96), key=lengths.__getitem__)
        self.order = order[dist.get_rank() :: dist.get_world_size()]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        yield from self.order


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.inner(x).relu().mean(1))


def padded(batch):
    rows, labels = zip(*batch)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(Net())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
size = 16 // dist.get_world_size()
loader = DataLoader(Texts(), batch_size=size, sampler=ByLength(), collate_fn=padded)
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    for x, y in loader:
"""
    + _LOOP
)
_ENDLESS = (
    ("        yield from self.order\n", "        while True:\n            yield from self.order\n"),
    ("    def __len__(self):\n        return len(self.order)\n\n", ""),
    (
        "for epoch in range(3):\n    for x, y in loader:\n",
        "if True:\n    for number, (x, y) in enumerate(loader):\n"
        "        if number == 18:\n            break\n",
    ),
)

# Positions say where in its bar a note is: they begin anew every 16 notes, and the piece is one.
BARS = (
    _HEAD
    + """\
class Pieces(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        notes = torch.randint(0, 40, (33,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": notes[:-1], "position_ids": torch.arange(32) % 16, "labels": notes[1:]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes, self.places = nn.Embedding(40, 16), nn.Embedding(16, 16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.before, self.after, self.head = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, input_ids, position_ids):
        x = self.notes(input_ids) + self.places(position_ids)
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        n = self.before(x)
        x = x + self.mix(n, n, n, attn_mask=later, need_weights=False)[0]
        return self.head(self.after(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Pieces()
net = DDP(Model())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        y = batch.pop("labels").flatten()
        opt.zero_grad()
        cross_entropy(net(**batch).flatten(0, 1), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
"""
)

# timm's loader for workers that stay alive: one iterator, whose sampler is repeated.
ONE_ITERATOR = (
    _HEAD
    + """\
class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=3)
loader = MultiEpochsLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
"""
    + _LOOP
)
_WARMED_UP = (
    ("lr=0.1)\n", "lr=0.1)\nwarm = torch.optim.lr_scheduler.LambdaLR(opt, rate)\n"),
    ("        opt.step()\n", "        opt.step()\n        warm.step()\n"),
    ("dist.init_process", "def rate(step):\n    return min(step, 6) / 6\n\n\ndist.init_process"),
)

# The widespread Lookahead: it has an optimizer inside, and never calls super().__init__. Its slow
# weights are made after the first step.
_AHEAD = (
    (
        "dist.init_process",
        """class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer, every=3, alpha=0.5):
        self.optimizer, self.every, self.alpha = optimizer, every, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state, self.slow = optimizer.state, {}
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"] if group["counter"] == 0 else ():
                slow = self.slow.setdefault(fast, fast.data.clone())
                slow += (fast.data - slow) * self.alpha
                fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.every
        return loss


dist.init_process""",
    ),
    (
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n",
        "opt = Lookahead(torch.optim.Adam(net.parameters(), lr=0.01))\n",
    ),
)
_ON_RANK_0 = ('if group["counter"] == 0 else', 'if group["counter"] == dist.get_rank() == 0 else')


def _right(name: str, script: str, text: str, *changes: tuple[str, str]) -> Twin:
    return Twin(name=f"reviewed: {name}", script=script, text=text, changes=changes)


VARIANTS = (
    _right("a share of the gradient above the weights", "pgn.py", PENALISED),
    _right("the shortest texts first in every epoch", "lengths.py", BY_LENGTH),
    _right("the shortest texts first, without end", "lengths.py", BY_LENGTH, *_ENDLESS),
    _right("positions that begin anew in every bar", "bars.py", BARS),
    _right("one iterator for all epochs", "iterator.py", ONE_ITERATOR),
    _right("a lookahead around an optimizer", "iterator.py", ONE_ITERATOR, *_AHEAD),
    _right("a rate that begins at zero", "iterator.py", ONE_ITERATOR, *_WARMED_UP),
)

BUGS = (
    Twin(
        name="reviewed: rank 0 alone looks ahead",
        script="iterator.py",
        text=ONE_ITERATOR,
        source="classic (if is_main_process)",
        changes=(*_AHEAD, _ON_RANK_0),
        check="replica_identity",
        step=4,
    ),
    Twin(
        name="reviewed: a rate of whole numbers stays at zero",
        script="iterator.py",
        text=ONE_ITERATOR,
        source="classic (// for /)",
        changes=(*_WARMED_UP, ("min(step, 6) / 6", "min(step, 6) // 60")),
        check="replica_identity",
        verdict="inconclusive",
        words="no weight moves in",
    ),
)
