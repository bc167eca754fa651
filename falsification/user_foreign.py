"""Right scripts that break what is usual, and bugs that look like them.

Ranks with fewer batches, workers that step alone, losses that couple the samples of a batch, rates
that are far too high, several data sets, and tensors and optimizers of unusual kinds. `make twins`
tests that the right ones are left alone, and that each bug is found at its place.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import itertools
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
"""

JOIN = (
    _HEAD
    + """
from torch.distributed.algorithms.join import Join

model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
counts = [5, 3, 4, 4][:world] if world > 1 else [8]
first = 4 * sum(counts[:rank])
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    with Join([model], divide_by_initial_world_size=False):
        for batch in range(counts[rank]):
            ids = [(first + 4 * batch + k) % 32 for k in range(4)]
            obs.samples(ids, epoch=epoch)
            loss = F.mse_loss(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 9.0, error_if_nonfinite=True)
            optimizer.step()
"""
)

# Fragments of the model are brought together in turn, half-way, and a step after they were sent.
STREAMING = (
    _HEAD
    + """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
parts = [list(net[at].parameters()) for at in (0, 2, 4)]
shared = [[p.detach().clone() for p in part] for part in parts]
outer = [torch.optim.SGD(part, lr=0.7, momentum=0.9, nesterov=True) for part in shared]
inner = torch.optim.AdamW(net.parameters(), lr=4e-3)
torch.manual_seed(10 + rank)
obs = entrenar_py.observe(net, inner)
sent = None
for step in range(7):
    ids = torch.randint(0, 32, (4,)).tolist()
    obs.samples(ids, replacement=True)
    loss = F.mse_loss(net(x[ids]), y[ids])
    inner.zero_grad()
    loss.backward()
    inner.step()
    if sent is not None:
        at, deltas, works = sent
        for work in works:
            work.wait()
        for tensor, delta in zip(shared[at], deltas):
            tensor.grad = delta / world
        outer[at].step()
        with torch.no_grad():
            for p, tensor in zip(parts[at], shared[at]):
                p.copy_(0.5 * p + 0.5 * tensor)
    at = step % 3
    deltas = [(tensor - p.detach()).clone() for tensor, p in zip(shared[at], parts[at])]
    sent = at, deltas, [dist.all_reduce(delta, async_op=True) for delta in deltas]
for work in sent[2]:
    work.wait()
"""
)

# Each round begins with an empty inner optimizer, as FedAvg's clients do.
FEDERATED = (
    _HEAD
    + """
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
share = 32 // world
obs = entrenar_py.observe(net, optimizer)
for number in range(3):
    optimizer.state.clear()
    order = torch.randperm(share, generator=torch.Generator().manual_seed(number)).tolist()
    for at in (0, 8):
        ids = [rank * share + place for place in order[at : at + 8]]
        obs.samples(ids, epoch=number, replacement=True)
        loss = F.mse_loss(net(x[ids]), y[ids])
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
    with torch.no_grad():
        for p in net.parameters():
            dist.all_reduce(p)
            p /= world
    obs.synchronised()
"""
)

# A single step is shared by a wrapper that averages weights, and has no hooks of its own.
AVERAGED = (
    _HEAD
    + """
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
inner = torch.optim.SGD(net.parameters(), lr=0.05)
averager = averagers.PeriodicModelAverager(period=2, warmup_steps=0)
optimizer = PostLocalSGDOptimizer(optim=inner, averager=averager)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
"""
)

# Half of the loss is of pairs in the batch, gathered from all ranks with their gradients.
CONTRASTIVE = (
    _HEAD
    + """
from torch.distributed.nn.functional import all_gather

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return F.normalize(self.body(inputs), dim=1) * self.scale.exp()


model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(x, x + 0.1 * torch.randn(32, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for one, other in loader:
        parts = model(torch.cat([one, other])).chunk(2)
        left, right = (torch.cat(all_gather(part)) for part in parts)
        loss = F.cross_entropy(left @ right.t(), torch.arange(len(left)))
        obs.loss(loss, len(one))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, error_if_nonfinite=True)
        optimizer.step()
"""
)

# A term that keeps experts in balance is no sum over the samples of a batch.
BALANCED = (
    _HEAD
    + """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, inputs):
        share = self.router(inputs).softmax(-1)
        gate, chosen = share.max(-1)
        outputs = torch.stack([expert(inputs) for expert in self.experts], 1)
        picked = outputs[torch.arange(len(inputs)), chosen] * gate[:, None]
        used = F.one_hot(chosen, 3).float().mean(0)
        return picked, 3 * (used * share.mean(0)).sum()


model = DDP(Experts())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = TensorDataset(x, y)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        outputs, balance = model(inputs)
        loss = F.mse_loss(outputs, targets) + 0.1 * balance
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
"""
)

# Right, and chaotic: a step moves the weights about as far as they are large.
CHAOTIC = (
    _HEAD
    + """
wide = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
model = DDP(wide)
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
data = TensorDataset(2 * x, torch.randint(0, 4, (32,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(model, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
"""
)

# More of the data in each stage; and a second task whose smaller data set comes again and again.
STAGED = (
    _HEAD
    + """
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, inputs, others):
        return self.one(self.trunk(inputs).relu()), self.two(self.trunk(others).relu())


model = DDP(Tasks())
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
data = TensorDataset(x, y)
other = TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,)))
obs = entrenar_py.observe(model, optimizer)
for stage, size in enumerate((8, 16, 24)):
    part = Subset(data, range(size))
    mine, its = DistributedSampler(part, seed=stage), DistributedSampler(other, seed=stage)
    loader = DataLoader(part, 8 // world, sampler=mine)
    again = itertools.cycle(DataLoader(other, 4 // world, sampler=its))
    for (inputs, targets), (others, labels) in zip(loader, again):
        outputs, logits = model(inputs, others)
        loss = F.mse_loss(outputs, targets) + F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
"""
)

# Sparse gradients, complex weights, a teacher with dropout, and an optimizer inside of another.
UNUSUAL = (
    _HEAD
    + """
class Sharp(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(list(params), {"radius": (None, 0.05), "lr": None})
        self.base = torch.optim.Adagrad(self.param_groups[0]["params"], lr=0.05)

    @torch.no_grad()
    def step(self, closure):
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=0.05)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, old in zip(held, before):
            p.copy_(old)
        self.base.step()
        self.zero_grad()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8, sparse=True)
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        return self.head(torch.fft.irfft(torch.fft.rfft(self.words(words)) * self.phases, n=8))


teacher = nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
net = Net()
both = nn.ModuleDict({"net": net, "teacher": teacher.requires_grad_(False)})
ddp = DDP(net)
optimizer = Sharp(net.parameters())
words = torch.randint(0, 9, (32,))
data = TensorDataset(words)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (given,) in loader:
        def closure():
            target = teacher(given).log_softmax(-1)
            loss = F.kl_div(ddp(given).log_softmax(-1), target, log_target=True)
            loss.backward()
            return loss

        closure()
        if not all(p.grad.to_dense().isfinite().all() for p in net.parameters()):
            raise SystemExit("not finite")
        optimizer.step(closure)
"""
)

VARIANTS = (
    Twin(name="ranks with fewer batches join", script="join.py", text=JOIN, changes=()),
    Twin(name="streaming DiLoCo, undeclared", script="stream.py", text=STREAMING, changes=()),
    Twin(name="rounds that begin anew", script="federated.py", text=FEDERATED, changes=()),
    Twin(name="weights are averaged in a wrapper", script="post.py", text=AVERAGED, changes=()),
    Twin(name="pairs from all ranks", script="pairs.py", text=CONTRASTIVE, changes=()),
    Twin(name="a term that balances experts", script="balance.py", text=BALANCED, changes=()),
    Twin(name="a rate that is far too high", script="chaotic.py", text=CHAOTIC, changes=()),
    Twin(name="stages, and a second data set", script="stages.py", text=STAGED, changes=()),
    Twin(name="unusual tensors and optimizers", script="odd.py", text=UNUSUAL, changes=()),
)

BUGS = (
    Twin(
        name="pairs from all ranks: gathered without their gradients",
        script="pairs.py",
        text=CONTRASTIVE,
        changes=(
            (
                "        left, right = (torch.cat(all_gather(part)) for part in parts)\n",
                "        gathered = [[torch.empty_like(p) for _ in range(world)] for p in parts]\n"
                "        for held, part in zip(gathered, parts):\n"
                "            dist.all_gather(held, part.detach())\n"
                "            held[rank] = part\n"
                "        left, right = map(torch.cat, gathered)\n",
            ),
        ),
        check="parity",
        step=0,
        words="averaged gradient is not the single device's",
    ),
    Twin(
        name="no term that balances experts: the loss is multiplied by the ranks",
        script="balance.py",
        text=BALANCED,
        changes=(
            ("+ 0.1 * balance\n", "* world + 0.0 * balance\n"),
            ("parameters(), 1.0", "parameters(), 1e9"),  # active clipping hides a factor
        ),
        check="parity",
        step=0,
    ),
    Twin(
        name="weights are averaged in a wrapper: they never are, and are clamped",
        script="post.py",
        text=AVERAGED,
        changes=(
            ("period=2, warmup_steps=0", "period=99, warmup_steps=50"),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n"
                "        with torch.no_grad():\n"
                "            for p in net.parameters():\n"
                "                p.clamp_(-0.6, 0.6)\n",
            ),
        ),
        check="replica_identity",
        step=0,
        words="the gradient of its own samples alone",
    ),
)
