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
