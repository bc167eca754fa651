import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(24, 6)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))


def apply(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
    optimizer.step()


class Trainer:
    def __init__(self, steps, folder):
        self.steps, self.path, self.step = steps, Path(folder) / "state.pt", 0
        self.net = network()
        self.ddp = DDP(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        if self.path.exists():
            self.load(torch.load(self.path))

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        self.step = state["step"]

    def save(self):
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"average": self.average.state_dict(), "step": self.step}
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    @torch.no_grad()
    def evaluate(self):
        kept = [weight.clone() for weight in self.net.parameters()]
        for weight, other in zip(self.net.parameters(), self.average.parameters()):
            weight.copy_(other)
        F.mse_loss(self.net(x), data.tensors[1])
        for weight, other in zip(self.net.parameters(), kept):
            weight.copy_(other)

    def run(self):
        obs = entrenar_py.observe(self.net, self.optimizer, sampler=loader, step=self.step)
        while self.step < self.steps:
            epoch, done = divmod(self.step, len(loader))
            sampler.set_epoch(epoch)
            for index, (inputs, targets) in enumerate(loader):
                if index < done or self.step == self.steps:
                    continue
                loss = F.mse_loss(self.ddp(inputs), targets)
                obs.loss(loss, len(inputs))
                apply(self.net, self.optimizer, loss)
                self.average.update_parameters(self.net)
                self.step += 1
                if self.step % 2 == 0:
                    self.evaluate()
                if rank == 0:
                    self.save()
                dist.barrier()


Trainer(int(sys.argv[1]), sys.argv[2]).run()
dist.destroy_process_group()
