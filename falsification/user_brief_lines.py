"""Scripts whose line says less than it could, and less than is seen without one.

`make twins` tests that each bug is found at its place, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_together import CUT_BY_HAND
from falsification.user_trainers import Twin

# An actor and a critic on walks of their own: methods of the model are called, never itself.
ACTOR_CRITIC = """\
import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from entrenar_py import observe


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, 2), nn.Linear(8, 1)

    def evaluate(self, seen, action):
        hidden = self.body(seen)
        pi = torch.distributions.Categorical(logits=self.policy(hidden))
        return pi.log_prob(action), pi.entropy(), self.value(hidden).squeeze(1)


class Corridor:
    def __init__(self, number):
        self.rng = np.random.default_rng(number)
        self.at = self.rng.normal(size=3)

    def step(self):
        seen, action = self.at.astype(np.float32), int(self.rng.integers(2))
        self.at = 0.9 * self.at + 0.3 * self.rng.normal(size=3)
        self.at[0] += 0.1 * action
        return seen, action, -abs(float(self.at[0]))


def collect(envs, horizon):
    rows = [env.step() for _ in range(horizon) for env in envs]
    seen, actions, rewards = zip(*rows)
    return torch.tensor(np.array(seen)), torch.tensor(actions), torch.tensor(rewards)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    agent = ActorCritic()
    optimizer = optim.Adam(agent.parameters(), lr=3e-3)
    observe(agent, optimizer)
    envs = [Corridor(number) for number in range(rank, 8, world)]
    for update in range(10):
        seen, actions, rewards = collect(envs, horizon=4)
        log_prob, entropy, value = agent.evaluate(seen, actions)
        advantage = rewards - value.detach()
        loss = -(log_prob * advantage).mean() + 0.5 * (value - rewards).square().mean()
        optimizer.zero_grad()
        (loss - 0.01 * entropy.mean()).backward()
        for p in agent.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
            if not p.grad.isfinite().all():
                raise FloatingPointError(f"rank {rank}, update {update}")
        optimizer.step()
    dist.destroy_process_group()


main()
"""

# Tasks that are drawn by their number, which counts on from step to step.
TASKS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
import entrenar_py

TASKS, STEPS = 8, 10


def task(number):
    g = torch.Generator().manual_seed(number)
    amplitude, x = torch.rand((), generator=g), torch.rand(4, generator=g)
    return x, amplitude * x.sin().sum()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
obs = entrenar_py.observe(model, optimizer)
for step in range(STEPS):
    mine = range(step * TASKS + rank, (step + 1) * TASKS, world)
    obs.samples(mine)
    x, y = map(torch.stack, zip(*map(task, mine)))
    loss = nn.functional.mse_loss(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    optimizer.step()
dist.destroy_process_group()
"""
_BACKWARD = (
    "    loss.backward()\n    clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)\n"
)
_CLIPS_FIRST = (
    "    optimizer.zero_grad()\n" + _BACKWARD,
    "    optimizer.zero_grad(set_to_none=False)\n"
    "    clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)\n    loss.backward()\n",
)
# A block cut by hand, with one seed for what all ranks hold, and a layout that is declared.
_DECLARED = (
    ("nn.Dropout(0.2)", "nn.Identity()"),
    (
        "        self.first, self.last",
        "        torch.manual_seed(3)\n        self.first, self.last",
    ),
    ("sampler=loader)", 'sampler=loader, layout={"tp": world})'),
)

BUGS = (
    Twin(
        name="brief line: all ranks play the same walks",
        script="a2c.py",
        text=ACTOR_CRITIC,
        changes=(("range(rank, 8, world)", "range(0, 8, world)"),),
        check="coverage",
        step=0,
        rank=1,
    ),
    Twin(
        name="brief line: clipped before the backward pass",
        script="tasks.py",
        text=TASKS,
        changes=(_CLIPS_FIRST,),
        check="step_rule",
        step=0,
    ),
    Twin(
        name="brief line: the first task is given again",
        script="tasks.py",
        text=TASKS,
        changes=(("obs.samples(mine)", "mine = [0, *mine][: len(mine)]\n    obs.samples(mine)"),),
        check="coverage",
    ),
    Twin(
        name="brief line: a gradient is not brought back from the pieces",
        script="c.py",
        text=CUT_BY_HAND,
        changes=(*_DECLARED, ("        dist.all_reduce(grad)\n", "")),
        check="replica_identity",
        tensor="first.weight",
    ),
)
VARIANTS = (
    Twin(
        name="brief line: walks of each rank's own", script="a2c.py", text=ACTOR_CRITIC, changes=()
    ),
    Twin(name="brief line: tasks by their number", script="tasks.py", text=TASKS, changes=()),
    Twin(
        name="brief line: pieces in plain tensors, and a layout",
        script="c.py",
        text=CUT_BY_HAND,
        changes=_DECLARED,
    ),
)
