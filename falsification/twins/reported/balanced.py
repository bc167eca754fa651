import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

args = argparse.ArgumentParser()
args.add_argument("--accumulation", type=int, default=1)
args = args.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(6, 3)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        mixed = sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return self.head(mixed.relu()).squeeze(1), gates


torch.manual_seed(1)
x = torch.randn(32, 6)
y = x[:, 0] * x[:, 1]
model = Gated()
ddp = DDP(model)
teacher = Gated()
teacher.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
obs = entrenar_py.observe(ddp, optimizer)
for step in range(8):
    ids = torch.arange(8) + step * 8 % 32
    for part in ids.chunk(world)[rank].chunk(args.accumulation):
        obs.samples(part.tolist(), epoch=step // 4)
        output, gates = ddp(x[part])
        with torch.no_grad():
            guide, _ = teacher(x[part])
        balance = 3 * gates.square().sum(-1).mean()
        loss = F.mse_loss(output, y[part]) + 0.1 * F.mse_loss(output, guide) + 0.2 * balance
        obs.loss(loss, len(part))
        loss = loss / args.accumulation
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), model.parameters()):
            slow.lerp_(fast, 0.1)
