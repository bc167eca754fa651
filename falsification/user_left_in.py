"""What a script forgot between its passes: gradients that are left in, teachers in training mode.

A run of its own would show these (gradients cleared by the harness, a teacher in the other mode),
and none is needed: the record of one run does. `make twins` tests that each bug is found, and that
the right ones are left alone.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def finite(*modules):
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None and not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")


def loader_of(*tensors):
    data = TensorDataset(*tensors)
    return DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=2))


"""

# Learns a policy from rows that were played before: the actor's loss goes through the critic.
ACTOR = (
    _HEAD
    + """
states, actions, returns = torch.randn(48, 5), torch.randn(48, 2), torch.randn(48, 1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.action, self.head = nn.Linear(5, 12), nn.Linear(2, 12), nn.Linear(12, 1)

    def forward(self, state, action):
        return self.head(torch.tanh(self.state(state) + self.action(action)))


actor = DDP(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2)))
critic = DDP(Critic())
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
loader = loader_of(states, actions, returns)
obs = entrenar_py.observe(nn.ModuleList([actor, critic]), [critic_opt, actor_opt], sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for state, action, value in loader:
        critic_opt.zero_grad()
        F.mse_loss(critic(state, action), value).backward()
        finite(critic)
        critic_opt.step()
        actor_opt.zero_grad()
        (-critic(state, actor(state)).mean()).backward()
        finite(actor)
        actor_opt.step()
"""
)

# Shards by torch's own calls, layer by layer.
SHARDED = (
    _HEAD
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (world,))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
for part in (net[0], net[2], net):
    fully_shard(part, mesh=mesh)
optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
loader = loader_of(torch.randn(48, 8))
obs = entrenar_py.observe(net, optim, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for (rows,) in loader:
        loss = F.mse_loss(net(rows), rows.roll(1, 1))
        obs.loss(loss, len(rows))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e6, error_if_nonfinite=True)
        optim.step()
        optim.zero_grad()
dist.destroy_process_group()
"""
)

# A class with callbacks, which counts batches.
TRAINER = (
    _HEAD
    + """
class Callback:
    def after_step(self, trainer):
        trainer.optimizer.zero_grad(set_to_none=False)


class Trainer:
    def __init__(self, module, loader, callbacks):
        self.module, self.loader, self.callbacks = module, loader, callbacks
        self.model = DDP(module)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        self.batch = 0
        self.obs = entrenar_py.observe(self.model, self.optimizer, sampler=loader)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, labels in self.loader:
                loss = F.cross_entropy(self.model(inputs), labels)
                self.obs.loss(loss, len(inputs))
                loss.backward()
                finite(self.module)
                self.optimizer.step()
                self.batch += 1
                for callback in self.callbacks:
                    callback.after_step(self)


rows = torch.randn(48, 6)
module = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))
Trainer(module, loader_of(rows, rows[:, :3].argmax(1)), [Callback()]).fit(2)
"""
)

# Two micro-batches a step, and a running mean of the loss to print.
WINDOWED = (
    _HEAD
    + """
rows = torch.randn(96, 6)
net = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 1))
ddp = DDP(net)
adamw = torch.optim.AdamW(net.parameters(), lr=2e-3)
loader = loader_of(rows, rows.square().sum(1, keepdim=True))
obs = entrenar_py.observe(ddp, adamw, sampler=loader)
running = 0.0
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for i, (given, wanted) in enumerate(loader):
        loss = F.smooth_l1_loss(ddp(given), wanted) / 2
        running = running + loss.detach()
        loss.backward()
        if i % 2:
            finite(net)
            adamw.step()
            adamw.zero_grad()
            running = 0.0
"""
)

# A student follows a teacher; or a policy is kept near to what it was (DPO).
DISTILLED = (
    _HEAD
    + """
def mlp(*between):
    return nn.Sequential(nn.Linear(6, 16), *between, nn.ReLU(), nn.Linear(16, 4))


teacher = mlp(nn.BatchNorm1d(16)).requires_grad_(False)
teacher.eval()
student = mlp()
model = DDP(student)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
loader = loader_of(torch.randn(48, 6))
obs = entrenar_py.observe(model, optimizer, sampler=loader)
torch.manual_seed(rank)
for epoch in range(2):
    model.train()
    loader.sampler.set_epoch(epoch)
    for (rows,) in loader:
        with torch.no_grad():
            wanted = teacher(rows).softmax(-1)
        loss = F.kl_div(model(rows).log_softmax(-1), wanted, reduction="batchmean")
        obs.loss(loss, len(rows))
        optimizer.zero_grad()
        loss.backward()
        finite(student)
        optimizer.step()
"""
)
_FILES = {
    WINDOWED: "windowed.py",
    ACTOR: "actor.py",
    SHARDED: "sharded.py",
    TRAINER: "trainer.py",
    DISTILLED: "student.py",
}
_EVAL = "teacher.eval()\n"
_NORMED = "teacher = mlp(nn.BatchNorm1d(16)).requires_grad_(False)\n"
_DROPPED = (_NORMED, "teacher = mlp(nn.Dropout(0.3)).requires_grad_(False)\n")
_REFERENCE = (
    (_NORMED, ""),
    ("student = mlp()\n", "student = mlp(nn.Dropout(0.2))\n"),
    (
        "            wanted = teacher(rows).softmax(-1)\n"
        '        loss = F.kl_div(model(rows).log_softmax(-1), wanted, reduction="batchmean")\n',
        "            before = teacher(rows).log_softmax(-1)\n"
        "        after = model(rows).log_softmax(-1)\n"
        "        gain = after[:, 0] - before[:, 0] - after[:, 1] + before[:, 1]\n"
        "        loss = -F.logsigmoid(0.5 * gain).mean()\n",
    ),
)
_COPIED = "model = DDP(student)\n"
_REFERENCE_OF = "teacher = copy.deepcopy(student).requires_grad_(False)\n" + _COPIED
_REFERENCE_EVAL = "teacher = copy.deepcopy(student).requires_grad_(False).eval()\n" + _COPIED


def _of(name: str, text: str, *changes: tuple[str, str], **told: str) -> Twin:
    return Twin(name=name, script=_FILES[text], text=text, changes=changes, **told)  # type: ignore[arg-type]


def _left(name: str, text: str, *changes: tuple[str, str]) -> Twin:
    return _of(f"left: {name}", text, *changes, check="weighting", words="gradients not cleared")


def _taught(name: str, *changes: tuple[str, str]) -> Twin:
    given = {"check": "liveness", "words": "it is in training mode"}
    return _of(f"teacher: {name}", DISTILLED, *changes, **given)


VARIANTS = (
    _of("left: right, an actor's loss through its critic", ACTOR),
    _of("left: right, shards", SHARDED),
    _of("left: right, a callback that clears", TRAINER),
    _of("left: right, a running mean", WINDOWED),
    _of("teacher: right, statistics of before", DISTILLED),
    _of("teacher: right, dropout that rests", DISTILLED, _DROPPED),
    _of(
        "teacher: right, a reference",
        DISTILLED,
        *_REFERENCE,
        (_EVAL, ""),
        (_COPIED, _REFERENCE_EVAL),
    ),
)

BUGS = (
    _left("an actor's loss stays in its critic", ACTOR, ("        critic_opt.zero_grad()\n", "")),
    _left("shards are never cleared", SHARDED, ("        optim.zero_grad()\n", "")),
    _left(
        "a callback clears every second time",
        TRAINER,
        ("        trainer.opt", "        trainer.batch % 2 or trainer.opt"),
    ),
    _left(
        "what is cleared is a copy's",
        TRAINER,
        (
            "        trainer.optimizer.zero_grad(set_to_none=False)\n",
            "        copy.deepcopy(trainer.module).zero_grad()\n",
        ),
    ),
    _left(
        "the head alone is cleared",
        TRAINER,
        (
            "        trainer.optimizer.zero_grad(set_to_none=False)\n",
            "        trainer.module[2].zero_grad()\n",
        ),
    ),
    _of(
        "left: each pass begins at the losses so far",
        WINDOWED,
        ("loss.detach()", "loss"),
        ("        loss.backward()\n", "        running.backward(retain_graph=True)\n"),
        check="weighting",
        verdict="inconclusive",
    ),
    _taught("its statistics move", (_EVAL, "")),
    _taught("it draws masks", _DROPPED, (_EVAL, "")),
    _taught(
        "a reference draws masks, as the policy does",
        *_REFERENCE,
        (_EVAL, ""),
        (_COPIED, _REFERENCE_OF),
    ),
)
