"""Optimizers that have another one step: right ones, and bugs that are silent in them.

A sharpness-aware one has two passes of the same samples in a step, and never steps as a whole. One
that looks back keeps slow weights beside those that its inside steps.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
torch.manual_seed(5)
x = torch.randn(48, 6)
pairs = TensorDataset(x, x.sin().sum(1, keepdim=True))
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1)))
shares = DistributedSampler(pairs, seed=5)
batches = DataLoader(pairs, batch_size=4, sampler=shares)
"""

CLIMBER = (
    _HEAD
    + """

class Climber(torch.optim.Optimizer):
    def __init__(self, params, reach, **named):
        super().__init__(params, {"reach": reach, **named})
        self.descent = torch.optim.Adam(self.param_groups, **named)
        self.param_groups = self.descent.param_groups

    def _tensors(self):
        return [(group, p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for _, p in self._tensors()]).norm()
        for group, p in self._tensors():
            self.state[p]["home"] = p.clone()
            p.add_(p.grad, alpha=group["reach"] / (norm + 1e-12).item())
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for _, p in self._tensors():
            p.copy_(self.state[p]["home"])
        self.descent.step()
        self.zero_grad()


optimizer = Climber(net.parameters(), reach=0.1, lr=0.01)
obs = entrenar_py.observe(net, optimizer)
for epoch in range(2):
    shares.set_epoch(epoch)
    for rows, wanted in batches:
        nn.functional.mse_loss(net(rows), wanted).backward()
        optimizer.ascend()
        nn.functional.mse_loss(net(rows), wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.descend()
dist.destroy_process_group()
"""
)

SLOW = (
    _HEAD
    + """

class Slow:
    def __init__(self, inside, every=3, pull=0.5):
        self.inside, self.every, self.pull, self.count = inside, every, pull, 0
        self.slow = [p.detach().clone() for group in inside.param_groups for p in group["params"]]

    def zero_grad(self):
        self.inside.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inside.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for group in self.inside.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast):
                slow.add_(p - slow, alpha=self.pull)
                p.copy_(slow)


optimizer = Slow(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
obs = entrenar_py.observe(net, optimizer.inside)
for epoch in range(2):
    shares.set_epoch(epoch)
    for rows, wanted in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(rows), wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
dist.destroy_process_group()
"""
)


def _climber(name: str, *changes: tuple[str, str], check: str = "", words: str = "") -> Twin:
    return Twin(
        name=f"wrapped: {name}",
        script="climber.py",
        text=CLIMBER,
        changes=changes,
        check=check,
        words=words,
    )


BUGS = (
    _climber(
        "weights that were moved uphill stay there",
        ('            p.copy_(self.state[p]["home"])\n', "            pass\n"),
        check="step_rule",
        words="had been moved along the gradient",
    ),
    _climber(
        "the gradient of before the climb stays in",
        (
            "(norm + 1e-12).item())\n        self.zero_grad()\n",
            "(norm + 1e-12).item())\n",
        ),
        check="weighting",
        words="holds that of the pass before its weights were moved",
    ),
    _climber(
        "the pass that counts is not synchronised",
        (
            "        nn.functional.mse_loss(net(rows), wanted).backward()\n        nn.utils",
            "        with net.no_sync():\n"
            "            nn.functional.mse_loss(net(rows), wanted).backward()\n        nn.utils",
        ),
        check="replica_identity",
    ),
    Twin(
        name="wrapped: slow weights are pulled to those of the first rank alone",
        script="slow.py",
        text=SLOW,
        changes=(
            (
                "                p.copy_(slow)\n",
                "                dist.get_rank() or p.copy_(slow)\n",
            ),
        ),
        check="replica_identity",
    ),
)

VARIANTS = (
    _climber("two passes a step, and another optimizer steps"),
    _climber(
        "a step as a whole, whose second pass is its closure",
        (
            "    def descend(self):\n",
            "    def step(self, closure):\n        self.ascend()\n"
            "        with torch.enable_grad():\n            closure()\n",
        ),
        (
            "        optimizer.ascend()\n"
            "        nn.functional.mse_loss(net(rows), wanted).backward()\n",
            "",
        ),
        (
            "        optimizer.descend()\n",
            "        again = lambda: nn.functional.mse_loss(net(rows), wanted).backward()\n"
            "        optimizer.step(again)\n",
        ),
    ),
    Twin(name="wrapped: slow weights", script="slow.py", text=SLOW, changes=()),
)
