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
