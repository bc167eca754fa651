"""Right trainings that turn roundings into differences of any size, and bugs in them.

`make twins` tests that each bug is found at its place, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# A recurrent network whose weights are so large that states drift apart, some rounding a step.
RECURRENT = """
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

LENGTH, WIDTH, BATCH = 12, 24, 16


class Recurrent(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(WIDTH, WIDTH) * gain / math.sqrt(WIDTH))
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        state = torch.tanh(self.enter(inputs))
        for _ in range(LENGTH):
            state = torch.tanh(state @ self.hidden)
        return self.leave(state)


def batches(rank, world_size):
    for epoch in range(2):
        for begin in range(0, 64, BATCH):
            yield epoch, list(range(begin, begin + BATCH))[rank::world_size]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Recurrent(gain=3.0)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True).sin()
    obs = entrenar_py.observe(model, optimizer, frozen=())
    for epoch, ids in batches(rank, world_size):
        obs.samples(ids, epoch=epoch)
        loss = nn.functional.mse_loss(wrapped(inputs[ids]), targets[ids])
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)
        optimizer.step()
    dist.destroy_process_group()


main()
"""
_CALM = ("gain=3.0", "gain=1.0")
_LOSS = "loss = nn.functional.mse_loss(wrapped(inputs[ids]), targets[ids])"
_IN_16_BITS = (
    f"        {_LOSS}",
    "        with torch.autocast('cpu', torch.bfloat16):\n"
    "            outputs = wrapped(inputs[ids])\n"
    "        loss = nn.functional.mse_loss(outputs.float(), targets[ids])",
)
_FACTOR = (
    "        optimizer.step()",
    "        if world_size > 1:\n"
    "            model.leave.weight.grad.mul_(1.01)\n"
    "        optimizer.step()",
)
_STEEP = ("lr=0.1", "lr=2.0")

VARIANTS = (
    Twin(name="a chaotic recurrent network", script="recurrent.py", text=RECURRENT, changes=()),
    Twin(
        name="a learning rate that is far too high",
        script="recurrent.py",
        text=RECURRENT,
        changes=(_STEEP,),
    ),
)

BUGS = (
    Twin(
        name="a gradient too long by a hundredth, in a chaotic network",
        script="recurrent.py",
        text=RECURRENT,
        changes=(_FACTOR,),
        check="parity",
        step=0,
        tensor="leave.weight",
        words="it is 1.01 times as large, in all elements",
    ),
    Twin(
        name="a gradient too long by a hundredth is no rounding to bfloat16",
        script="recurrent.py",
        text=RECURRENT,
        changes=(_CALM, _FACTOR),
        check="parity",
        step=0,
        tensor="leave.weight",
        words="it is 1.01 times as large, in all elements",
    ),
    Twin(
        name="a gradient too long by a hundredth, in 16 bits",
        script="recurrent.py",
        text=RECURRENT,
        changes=(_CALM, _IN_16_BITS, _FACTOR),
        check="parity",
        step=0,
        tensor="leave.weight",
        words="in what none of its micro-batches gave",
    ),
)
