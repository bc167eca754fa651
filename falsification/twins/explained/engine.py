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
