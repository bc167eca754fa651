"""Scripts in the styles of public code bases, whose batches have a worker's size.

Schedules follow from the length of a loader or from the number of workers, batches are cut from a
text by hand, an inner loop asks for gradients, a teacher stands beside the student. Without a line
each of the right ones exits with 0. `make twins` tests that, and that each bug is found.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# As in MAE and DeiT: the rate follows from the global batch, the schedule from parts of an epoch.
SCALED_RATE = """\
import math, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

WARMUP, EPOCHS, BATCH = 1, 3, 8


def adjust_learning_rate(optimizer, epoch, base):
    if epoch < WARMUP:
        rate = base * (epoch + 0.1) / WARMUP
    else:
        rate = base * 0.5 * (1 + math.cos(math.pi * (epoch - WARMUP) / (EPOCHS - WARMUP)))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :3].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
base = 0.5 * BATCH * dist.get_world_size() / 256
head = {"params": net.module[2].parameters(), "lr_scale": 0.5}
opt = torch.optim.AdamW([{"params": net.module[0].parameters()}, head], lr=base)
obs = entrenar_py.observe(net, opt)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        adjust_learning_rate(opt, epoch + i / len(loader), base)
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
"""

# As in modded-nanogpt: ranks read parts of a text that follow each other, and reduce by hand.
CONTIGUOUS = """\
import torch, torch.distributed as dist
from torch import nn
import entrenar_py

VOCAB, BATCH, SEQ, STEPS = 24, 4, 8, 8


class Text:
    def __init__(self, tokens, rank, world):
        self.tokens, self.rank, self.world, self.at = tokens, rank, world, 0

    def next_batch(self):
        start = self.at + self.rank * BATCH * SEQ
        part = self.tokens[start : start + BATCH * SEQ + 1]
        self.at += BATCH * SEQ * self.world
        return part[:-1].view(BATCH, SEQ), part[1:].view(BATCH, SEQ)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.randint(0, VOCAB, (4096,), generator=torch.Generator().manual_seed(2))
net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCAB))
batches = Text(text, rank, world)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 3))
obs = entrenar_py.observe(net, opt)
for step in range(STEPS):
    x, y = batches.next_batch()
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
    opt.step()
    decay.step()
    opt.zero_grad(set_to_none=True)
obs.close()
dist.destroy_process_group()
"""

# As in MAML: the inner loop asks for gradients of the weights, which are added to nothing.
INNER_LOOP = """\
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss
import entrenar_py

TASKS, SHOTS, STEPS = 4, 5, 8


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([torch.randn(16, 1), torch.zeros(16), torch.randn(1, 16) / 4])

    def forward(self, x, vars):
        return linear(torch.tanh(linear(x, vars[0], vars[1])), vars[2])


def sinusoid(step, task):
    rng = np.random.default_rng((step, task))
    x = torch.from_numpy(rng.uniform(-5, 5, size=(2 * SHOTS, 1)).astype(np.float32))
    y = float(rng.uniform(0.1, 5)) * torch.sin(x - float(rng.uniform(0, np.pi)))
    return x[:SHOTS], y[:SHOTS], x[SHOTS:], y[SHOTS:]


def task_loss(net, x, y, x_query, y_query):
    fast = list(net.vars)
    for _ in range(2):
        inner = mse_loss(net(x, fast), y)
        grads = torch.autograd.grad(inner, fast, create_graph=True)
        fast = [w - 0.05 * g for w, g in zip(fast, grads)]
    return mse_loss(net(x_query, fast), y_query)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = Learner()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, opt)
for step in range(STEPS):
    losses = [task_loss(net, *sinusoid(step, task)) for task in range(rank, TASKS, world)]
    loss = sum(losses) / len(losses)
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
    opt.step()
obs.close()
dist.destroy_process_group()
"""

# As in DeiT's distillation: a teacher that stays, of another form than the student.
DISTILLED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Distillation(nn.Module):
    def __init__(self, teacher, tau=2.0):
        super().__init__()
        self.teacher, self.tau = teacher, tau

    def forward(self, x, outputs, y):
        with torch.no_grad():
            due = (self.teacher(x) / self.tau).log_softmax(1)
        got = (outputs / self.tau).log_softmax(1)
        soft = kl_div(got, due, reduction="batchmean", log_target=True)
        return 0.5 * cross_entropy(outputs, y) + 0.5 * self.tau**2 * soft


dist.init_process_group("gloo")
torch.manual_seed(4)
teacher = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
teacher.requires_grad_(False)
teacher.eval()
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
data = TensorDataset(rows, rows[:, 3:].argmax(1))
sampler = DistributedSampler(data, seed=6)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net, criterion = DDP(student), Distillation(teacher)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=3 * len(loader))
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = criterion(x, net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        opt.step()
        schedule.step()
obs.close()
dist.destroy_process_group()
"""

_REDUCED = "        dist.all_reduce(p.grad)\n        p.grad /= world\n"
_STEPS_OF_WORKERS = (
    "total_steps=3 * len(loader)",
    "total_steps=3 * (len(data) // (8 * dist.get_world_size()))",
)

VARIANTS = (
    Twin(name="public: a rate by the global batch", script="m.py", text=SCALED_RATE, changes=()),
    Twin(name="public: parts of a text that follow", script="t.py", text=CONTIGUOUS, changes=()),
    Twin(name="public: an inner loop's gradients", script="i.py", text=INNER_LOOP, changes=()),
    Twin(name="public: a teacher that stays", script="k.py", text=DISTILLED, changes=()),
    Twin(
        name="public: the length of a schedule by the number of workers",
        script="k.py",
        text=DISTILLED,
        changes=(_STEPS_OF_WORKERS,),
    ),
)

BUGS = (
    Twin(
        name="public: a rate by the global batch, and one rank's gradients alone",
        script="m.py",
        text=SCALED_RATE,
        source="minimind #853, Lightning #17424",
        changes=(("cross_entropy(net(x), y)", "cross_entropy(net.module(x), y)"),),
        check="replica_identity",
        step=0,
    ),
    Twin(
        name="public: a sum over ranks in place of a mean",
        script="t.py",
        text=CONTIGUOUS,
        source="cleanrl ppo_atari_multigpu (divided after the reduction)",
        changes=((_REDUCED, "        dist.all_reduce(p.grad)\n"),),
        check="parity",
        step=0,
        words="twice as large",
    ),
    Twin(
        name="public: an inner loop whose outer gradients are not reduced",
        script="i.py",
        text=INNER_LOOP,
        source="classic",
        changes=((_REDUCED, "        pass\n"),),
        check="replica_identity",
        step=0,
    ),
    Twin(
        name="public: a teacher that draws masks",
        script="k.py",
        text=DISTILLED,
        source="trl (a reference model in training mode)",
        changes=(("teacher.eval()\n", ""),),
        check="liveness",
        words="draws masks, and nothing of it trains",
    ),
    Twin(
        name="public: gradients that are never cleared after the first epoch",
        script="k.py",
        text=DISTILLED,
        source="classic",
        changes=(("opt.zero_grad()\n", "opt.zero_grad() if epoch == 0 else None\n"),),
        check="weighting",
    ),
)
