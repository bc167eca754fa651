"""Broken scripts whose error one exact equation explains, and right ones that look like them.

`make twins` tests that the named check finds each bug, although something else that may differ (a
random number, a change on purpose) would leave the comparison open.
"""

from __future__ import annotations

from falsification.user_oracle_scripts import GAN
from falsification.user_trainers import Twin

# A research loop that adds gradients over ranks, and takes the mean where it moves the weights.
SUMMED = """
import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class SummedSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, world):
        super().__init__(params, {"lr": lr})
        self.world = world

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.world)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x, y = torch.randn(48, 5), torch.randn(48, 2)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
opt = SummedSGD(net.parameters(), 0.2, world)
obs = entrenar_py.observe(net, opt)
for step in range(6):
    ids = list(range(8 * step, 8 * step + 8))[rank::world]
    obs.samples(ids, epoch=0)
    loss = nn.functional.mse_loss(net(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        if not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")
    opt.step()
obs.close()
dist.destroy_process_group()
"""
_OWN = SUMMED[SUMMED.index("class SummedSGD") : SUMMED.index("dist.init_process_group")]
# Adam's state follows from the mean, although the gradient that it is given is the sum.
_ADAM = """class SummedAdam(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(dist.get_world_size())
        return super().step(closure)


"""
# What nothing divides is made up for by the learning rate.
_IN_RATE = (
    (_OWN, ""),
    ("SummedSGD(net.parameters(), 0.2, world)", "torch.optim.SGD(net.parameters(), 0.2 / world)"),
)
_MOMENTUM = ("0.2 / world)", "0.2 / world, momentum=0.9)")
_AS_ADAM = (
    (_OWN, _ADAM),
    ("SummedSGD(net.parameters(), 0.2, world)", "SummedAdam(net.parameters(), lr=0.02)"),
)

# A class Trainer around DDP, with micro-batches, two parameter groups and clipping.
TRAINER = """
import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

cli = argparse.ArgumentParser()
cli.add_argument("--accumulation", type=int, default=1)
args = cli.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.norm(torch.relu(self.inp(x))))


class Trainer:
    def __init__(self, model, optimizer, data, targets):
        self.raw, self.optimizer = model, optimizer
        self.data, self.targets = data, targets
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = DDP(model)
        self.weights = model.parameters()
        self.obs = entrenar_py.observe(model, optimizer)

    def backward(self, ids):
        rows = self.data[ids] + 0 * torch.rand(len(ids), 1)
        loss = nn.functional.cross_entropy(self.model(rows), self.targets[ids])
        self.obs.loss(loss, len(ids))
        (loss / args.accumulation).backward()

    def clip(self):
        nn.utils.clip_grad_norm_(self.raw.parameters(), 0.2, error_if_nonfinite=True)

    def step(self, ids):
        mine = ids[self.rank :: self.world]
        for number in range(args.accumulation):
            part = mine[number :: args.accumulation]
            last = number == args.accumulation - 1
            self.obs.samples(part, epoch=self.epoch)
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.backward(part)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, epochs=2, batch=16):
        for self.epoch in range(epochs):
            by = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(len(self.data), generator=by).tolist()
            for at in range(0, len(order), batch):
                self.step(order[at : at + batch])
        self.obs.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    data, targets = torch.randn(64, 6), torch.randint(3, (64,))
    model = Net()
    torch.manual_seed(dist.get_rank())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.SGD([{"params": decayed}, {"params": others}], lr=0.3, momentum=0.9)
    Trainer(model, optimizer, data, targets).run()
    dist.destroy_process_group()


main()
"""
_CLIP = "nn.utils.clip_grad_norm_(self.raw.parameters(), 0.2, error_if_nonfinite=True)"
# A guard in place of clipping, so that nothing else is wrong.
_GUARDED = (
    _CLIP,
    "assert all(p.grad.isfinite().all() for p in self.raw.parameters())",
)
_CLEARED = "        self.optimizer.zero_grad()\n"
_PROBE = (
    f"{_CLEARED}        self.raw.eval()\n"
    "        self.raw(self.data[:8]).logsumexp(1).mean().backward()\n"
    "        self.raw.train()\n"
)

# An engine that divides what it is given by the micro-batches, as DeepSpeed's and accelerate's do.
ENGINE = """
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py


class Engine:
    def __init__(self, module, optimizer, micro_batches):
        self.module, self.optimizer = DistributedDataParallel(module), optimizer
        self.micro_batches, self.calls = micro_batches, 0

    @property
    def at_boundary(self):
        return (self.calls + 1) % self.micro_batches == 0

    def backward(self, loss):
        (loss / self.micro_batches).backward()

    def step(self):
        if self.at_boundary:
            nn.utils.clip_grad_norm_(self.module.parameters(), 9.0, error_if_nonfinite=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.calls += 1


def build(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


dist.init_process_group("gloo")
torch.manual_seed(21)
gas, temperature = 4, 2.0
features, goals = torch.randn(96, 5), torch.randn(96, 3)
student, teacher = build(5, 12, 3), build(5, 6, 3).requires_grad_(False)
engine = Engine(student, torch.optim.AdamW(student.parameters(), lr=1e-2), gas)
obs = entrenar_py.observe(engine.module, engine.optimizer)
draw = torch.utils.data.DistributedSampler(features, shuffle=True, drop_last=True)
pairs = torch.utils.data.TensorDataset(torch.arange(96), features, goals)
loader = torch.utils.data.DataLoader(pairs, batch_size=4, sampler=draw)
for epoch in range(2):
    draw.set_epoch(epoch)
    for number, x, y in loader:
        obs.samples(number.tolist(), epoch=epoch)
        with contextlib.nullcontext() if engine.at_boundary else engine.module.no_sync():
            out = engine.module(x)
            loss = F.mse_loss(out, y)
            engine.backward(loss)
        engine.step()
obs.close()
dist.destroy_process_group()
"""
_LOSS = "loss = F.mse_loss(out, y)"


def _engine(name: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(name=f"explained: {name}", script="e.py", text=ENGINE, changes=changes, **fields)  # type: ignore[arg-type]


def _trainer(name: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(name=f"explained: {name}", script="t.py", text=TRAINER, changes=changes, **fields)  # type: ignore[arg-type]


BUGS = (
    Twin(
        name="explained: the sum over ranks is divided nowhere",
        script="summed.py",
        text=SUMMED,
        source="classic",
        changes=((" / self.world)", ")"),),
        check="parity",
        step=0,
        tensor="0.weight",
        words="it is twice as large (world_size)",
    ),
    Twin(
        name="explained: the learning rate is divided, and the gradient as well",
        script="summed.py",
        text=SUMMED,
        source="classic (a rate for sums, kept for means)",
        changes=(
            *_IN_RATE,
            ("        dist.all_reduce(p.grad)\n", "        dist.all_reduce(p.grad.div_(world))\n"),
        ),
        check="parity",
        step=0,
        words="the learning rate is not the single device's",
    ),
    Twin(
        name="explained: the learning rate makes up for the sum, and weight decay is forgotten",
        script="summed.py",
        text=SUMMED,
        source="classic (lr / world_size)",
        changes=(*_IN_RATE, ("0.2 / world)", "0.2 / world, weight_decay=0.5)")),
        check="parity",
        step=0,
        words="the learning rate is not the single device's",
    ),
    Twin(
        name="explained: Adam's weights hide that nothing divides the sum",
        script="summed.py",
        text=SUMMED,
        source="classic",
        changes=(*_AS_ADAM, ("p.grad.div_(dist.get_world_size())", "p.grad.div_(1)")),
        check="parity",
        step=0,
        words="it is twice as large (world_size)",
    ),
    _trainer(
        "the loss is divided by the micro-batches twice, beside noise by rank",
        _GUARDED,
        ("(loss / args.accumulation)", "(loss / args.accumulation / args.accumulation)"),
        source="classic (divided by hand, and by the wrapper)",
        turned=("accumulation",),
        check="parity",
        step=0,
        words="it is half as large",
    ),
    _trainer(
        "rank 0's micro-batches alone are applied, beside noise by rank",
        _GUARDED,
        ("self.model = DDP(model)", "self.model = DDP(model) if self.world == 1 else First(model)"),
        (
            "class Trainer:\n",
            "class First(nn.Module):\n"
            "    def __init__(self, module):\n"
            "        super().__init__()\n"
            "        self.module, self.no_sync = module, contextlib.nullcontext\n\n"
            "    def forward(self, x):\n"
            "        return self.module(x)\n\n\n"
            "class Trainer:\n",
        ),
        (
            "        self.clip()\n",
            "        for p in self.raw.parameters():\n"
            "            dist.broadcast(p.grad, 0)\n"
            "        self.clip()\n",
        ),
        source="classic (broadcast for all_reduce)",
        check="parity",
        step=0,
    ),
    _trainer(
        "each parameter group is clipped by its own norm",
        (
            f"        {_CLIP}\n",
            "        for group in self.optimizer.param_groups:\n"
            "            nn.utils.clip_grad_norm_(group['params'], 0.1, error_if_nonfinite=True)\n",
        ),
        source="classic (a loop over param_groups)",
        check="step_rule",
        words="each group was clipped by its own norm",
    ),
    _trainer(
        "the parameters to clip are an exhausted generator",
        (_CLIP, _CLIP.replace("self.raw.parameters()", "self.weights")),
        source="classic (a generator that is kept)",
        check="step_rule",
        words="the gradient of step 0 alone is clipped",
    ),
    _trainer(
        "gradients of a look at held-out data are applied",
        _GUARDED,
        (_CLEARED, _PROBE),
        source="classic (a probe of gradients)",
        check="weighting",
        step=1,
        words="backward passes in evaluation mode",
    ),
    Twin(
        name="explained: the discriminator applies what the generator's loss left",
        script="gan.py",
        text=GAN,
        source="classic (zero_grad right after the step)",
        changes=(
            ("    opt_d.zero_grad()\n", ""),
            ("    opt_d.step()\n", "    opt_d.step()\n    opt_d.zero_grad()\n"),
        ),
        check="weighting",
        step=1,
        words="gradients not cleared after step 0",
    ),
    _engine(
        "the script divides what its engine divides",
        (_LOSS, f"{_LOSS} / gas"),
        source="accelerate #1726 (a loss that is divided before accelerator.backward)",
        check="weighting",
        step=0,
        words="4 micro-batches has its loss divided by 4 twice",
    ),
    _engine(
        "the script divides what its engine divides, and evaluates a mean of losses",
        (_LOSS, f"{_LOSS} / gas"),
        (
            "class Engine:\n",
            "def evaluate(losses):\n"
            "    n = len(losses)\n"
            "    total_loss = sum(losses)\n"
            "    return total_loss / n\n\n\n"
            "class Engine:\n",
        ),
        ("        engine.step()\n", "        engine.step()\n    evaluate([loss.item()] * 2)\n"),
        source="accelerate #1726 (a loss that is divided before accelerator.backward)",
        check="weighting",
        step=0,
        words="4 micro-batches has its loss divided by 4 twice",
    ),
    _engine(
        "two micro-batches that are divided by their number twice",
        ("gas, temperature = 4, 2.0", "gas, temperature = 2, 2.0"),
        (_LOSS, f"{_LOSS} / gas"),
        source="accelerate #1726 (a loss that is divided before accelerator.backward)",
        check="weighting",
        step=0,
        words="2 micro-batches has its loss divided by 2 twice",
    ),
    _engine(
        "three micro-batches that are divided by their number twice",
        ("gas, temperature = 4, 2.0", "gas, temperature = 3, 2.0"),
        (_LOSS, f"{_LOSS}.div(gas)"),
        source="accelerate #1726 (a loss that is divided before accelerator.backward)",
        check="weighting",
        step=0,
        words="3 micro-batches has its loss divided by 3 twice",
    ),
)

VARIANTS = (
    Twin(
        name="explained: gradients are added, and divided in the optimizer's own step",
        script="summed.py",
        text=SUMMED,
        changes=(),
    ),
    Twin(
        name="explained: gradients are added, and divided before Adam's step",
        script="summed.py",
        text=SUMMED,
        changes=_AS_ADAM,
    ),
    Twin(
        name="explained: the learning rate makes up for the sum",
        script="summed.py",
        text=SUMMED,
        changes=_IN_RATE,
    ),
    Twin(
        name="explained: the learning rate makes up for the sum, and for momentum",
        script="summed.py",
        text=SUMMED,
        changes=(*_IN_RATE, _MOMENTUM),
    ),
    _trainer("noise by rank without an effect", _GUARDED, turned=("accumulation",)),
    _trainer("two groups that are clipped together"),
    _trainer("a probe of gradients, which is cleared", _GUARDED, (_CLEARED, _PROBE + _CLEARED)),
    _trainer(
        "each tensor is clipped by its own norm, on purpose",
        (
            f"        {_CLIP}\n",
            "        for p in self.raw.parameters():\n"
            "            nn.utils.clip_grad_norm_(p, 0.1, error_if_nonfinite=True)\n",
        ),
    ),
    _engine(
        "half of a squared error, in two micro-batches",
        ("gas, temperature = 4, 2.0", "gas, temperature = 2, 2.0"),
        (_LOSS, f"{_LOSS} / 2"),
    ),
    _engine(
        "a mean over two heads, in two micro-batches",
        ("gas, temperature = 4, 2.0", "gas, heads = 2, 2"),
        (_LOSS, f"{_LOSS} / heads"),
    ),
    _engine(
        "three heads' mean, in three micro-batches",
        ("gas, temperature = 4, 2.0", "gas, temperature = 3, 2.0"),
        (_LOSS, "loss = sum(F.mse_loss(out[:, head], y[:, head]) for head in range(3)) / 3"),
    ),
    _engine(
        "a mean over as many heads, in four micro-batches",
        ("gas, temperature = 4, 2.0", "gas, heads = 4, 4"),
        (_LOSS, f"{_LOSS} / heads"),
    ),
    _engine(
        "a criterion's number of tasks, in four micro-batches",
        (
            "class Engine:\n",
            "class Criterion(nn.Module):\n"
            "    def __init__(self, tasks):\n"
            "        super().__init__()\n"
            "        self.tasks = tasks\n\n"
            "    def forward(self, out, y):\n"
            "        return F.mse_loss(out, y) / self.tasks\n\n\n"
            "criterion = Criterion(4)\n\n\n"
            "class Engine:\n",
        ),
        (_LOSS, "loss = criterion(out, y)"),
    ),
    _engine("a temperature squared, in four micro-batches", (_LOSS, f"{_LOSS} / temperature**2")),
    _engine(
        "an integer temperature squared, in four micro-batches",
        ("temperature = 4, 2.0", "temperature = 4, 2"),
        (
            _LOSS,
            "soft = F.softmax(teacher(x) / temperature, 1)\n"
            "            hard = F.log_softmax(out / temperature, 1)\n"
            "            loss = -(soft * hard).mean() / temperature**2",
        ),
    ),
    _engine(
        "twice a variance, in four micro-batches",
        (_LOSS, f"variance = 2\n            {_LOSS} / (2 * variance)"),
    ),
    _engine("a quarter of an error, in four micro-batches", (_LOSS, f"{_LOSS} / 4")),
)
