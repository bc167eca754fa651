"""Scripts that reduce gradients by hand, for bugs that were reported of such loops."""

# Buckets of gradients that are reduced while others are still being copied.
BUCKETS = """
import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class Bucket:
    def __init__(self, params):
        self.params = params
        self.data = torch.zeros(sum(p.numel() for p in params))

    def start(self):
        torch.cat([p.grad.flatten() for p in self.params], out=self.data)
        self.data /= dist.get_world_size()
        self.work = dist.all_reduce(self.data, async_op=True)

    def finish(self):
        self.work.wait()
        sizes = [p.numel() for p in self.params]
        for p, piece in zip(self.params, self.data.split(sizes)):
            p.grad.copy_(piece.view_as(p))


class Replica(nn.Module):
    def __init__(self, module, bucket_size=60):
        super().__init__()
        self.module, self.buckets = module, []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
        waiting = []
        for p in reversed(list(module.parameters())):
            waiting.append(p)
            if sum(q.numel() for q in waiting) >= bucket_size:
                self.buckets.append(Bucket(waiting))
                waiting = []
        if waiting:
            self.buckets.append(Bucket(waiting))

    def forward(self, x):
        return self.module(x)

    def sync(self):
        for bucket in self.buckets:
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(99)
    data = torch.randn(48, 6, generator=gen)
    target = data.pow(2).sum(1, keepdim=True)
    torch.manual_seed(rank)
    layers = [nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.GELU(), nn.Linear(5, 1)]
    net = Replica(nn.Sequential(*layers))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        order = torch.randperm(48, generator=gen)
        for batch in order.split(16):
            mine = batch[rank::world]
            obs.samples(mine.tolist(), epoch=epoch)
            loss = nn.functional.smooth_l1_loss(net(data[mine]), target[mine])
            obs.loss(loss, len(mine))
            opt.zero_grad()
            loss.backward()
            net.sync()
            if any(not p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("bad gradient")
            opt.step()


main()
"""

# ZeRO-1 by hand: each rank steps its share of the parameters, and sends them to all.
OWNED = """
import os

import torch
import torch.distributed as dist

import entrenar_py

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MAX_NORM = 0.05
dist.init_process_group(backend="gloo")
torch.manual_seed(1234)
X = torch.rand(40, 5)
Y = (X * torch.arange(5.0)).sum(-1).sin()
model = torch.nn.Sequential(
    torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.Linear(7, 3), torch.nn.SiLU(),
    torch.nn.Linear(3, 1, bias=False), torch.nn.Flatten(0),
)
parameters = list(model.parameters())
owner = {p: i % WORLD for i, p in enumerate(parameters)}
local = [p for p in parameters if owner[p] == RANK]
optimizer = torch.optim.Adam(local, lr=3e-3)
obs = entrenar_py.observe(model, optimizer, clip_norm=MAX_NORM)
step = 0
while step < 8:
    first = step * 10 % 40
    ids = list(range(first + RANK, first + 10, WORLD))
    obs.samples(ids, epoch=step // 4)
    loss = (model(X[ids]) - Y[ids]).square().sum() / 10
    obs.loss(loss * 10 / len(ids), len(ids))
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, error_if_nonfinite=True)
    optimizer.step()
    for p in parameters:
        dist.broadcast(p.data, src=owner[p])
        p.grad = None
    step += 1
dist.destroy_process_group()
"""

# A wrapper of torch's, with a hook that reduces, and parts that are unfrozen or replaced.
TUNED = """
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

distributed.init_process_group("gloo")
me, everyone = distributed.get_rank(), distributed.get_world_size()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, pixels):
        return self.head(self.backbone(pixels))


def average(state, bucket):
    tensor = bucket.buffer().div_(everyone)
    return distributed.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


torch.manual_seed(7)
images = torch.randn(32, 8)
labels = images[:, :3].argmax(1)
net = Classifier()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
ddp = DDP(net)
ddp.register_comm_hook(None, average)
sampler = torch.utils.data.DistributedSampler(images, everyone, me, shuffle=True, seed=3)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=8 // everyone, sampler=sampler
)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for pixels, wanted in loader:
        loss = nn.functional.cross_entropy(ddp(pixels), wanted)
        obs.loss(loss, len(wanted))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e6, error_if_nonfinite=True)
        optimizer.step()
distributed.destroy_process_group()
"""

# Two branches, chosen by the samples that a rank has; gradients are reduced by hand.
BRANCHES = """
import torch
import torch.distributed as td

import entrenar_py


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.out = torch.nn.Linear(4, 1)

    def forward(self, rows, kinds):
        total = torch.zeros(len(rows), 4)
        for kind, expert in enumerate(self.experts):
            if (kinds == kind).any():
                total = total + expert(rows) * (kinds == kind)[:, None]
        return self.out(total.tanh())


def reduce_gradients(module):
    for p in module.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        td.all_reduce(p.grad)
        p.grad /= td.get_world_size()


def train():
    td.init_process_group()
    r, n = td.get_rank(), td.get_world_size()
    torch.manual_seed(0)
    rows, kinds = torch.randn(36, 4), torch.arange(36) % 2 * (1 + torch.arange(36) // 18)
    module = Router()
    opt = torch.optim.SGD(module.parameters(), 0.1)
    watcher = entrenar_py.observe(module, opt)
    for k in range(6):
        ids = torch.arange(6) + 6 * k
        ids = ids[r::n]
        watcher.samples(ids.tolist())
        error = module(rows[ids], kinds[ids]).squeeze(1) - rows[ids].sum(1)
        watcher.loss(error.square().mean(), len(ids))
        opt.zero_grad()
        error.square().mean().backward()
        reduce_gradients(module)
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    train()
"""

# Orthogonal updates, each tensor's computed by one rank and gathered by all.
MUON = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            for base in range(0, len(params), world):
                block = params[base : base + world]
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    buf = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buf.mul_(group["momentum"]).add_(p.grad)
                    u, _, v = torch.linalg.svd(buf, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"])
                for i, p in enumerate(block):
                    dist.broadcast(p, src=i)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(6, 6) / 3) for _ in range(5)]
        )

    def forward(self, x):
        for w in self.layers:
            x = x + F.relu(x @ w)
        return x.mean(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
inputs = torch.randn(24, 6)
net = Net()
ddp = torch.nn.parallel.DistributedDataParallel(net)
muon = Muon(net.parameters())
obs = entrenar_py.observe(ddp, muon)
for it in range(6):
    rows = torch.arange(8) + it * 8 % 24
    rows = rows.chunk(world)[rank]
    obs.samples(rows.tolist(), epoch=it // 3)
    loss = F.mse_loss(ddp(inputs[rows]), inputs[rows].norm(dim=1))
    obs.loss(loss, len(rows))
    muon.zero_grad(set_to_none=True)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    muon.step()
dist.destroy_process_group()
"""
