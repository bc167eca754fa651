"""Scripts whose ranks hold parts: of sequences, of tensors, of the state; and their snapshots."""

# Context parallelism by hand: each rank has a piece of each sequence, and attends to all of it.
CONTEXT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py

dist.init_process_group("gloo")
cp, size = dist.get_rank(), dist.get_world_size()
VOCAB, LENGTH, DIM = 11, 8, 6


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(size, 1)[cp]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = torch.nn.Embedding(VOCAB, DIM)
        self.pos = torch.nn.Embedding(LENGTH, DIM)
        self.qkv = torch.nn.Linear(DIM, 3 * DIM)
        self.norm = torch.nn.LayerNorm(DIM)
        self.out = torch.nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        h = self.tok(tokens) + self.pos(positions)
        q, k, v = self.qkv(h).chunk(3, -1)
        keys, values = Gather.apply(k.contiguous()), Gather.apply(v.contiguous())
        seen = torch.arange(LENGTH)[None, :] <= positions[:, None]
        h = h + F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(self.norm(h))


torch.manual_seed(13)
text = torch.randint(0, VOCAB, (24, LENGTH + 1))
skipped = torch.rand(24, LENGTH) < torch.linspace(0.7, 0.0, LENGTH)
net = Model()
opt = torch.optim.SGD(net.parameters(), lr=0.5)
obs = entrenar_py.observe(net, opt, layout={"cp": size})
piece = slice(cp * LENGTH // size, (cp + 1) * LENGTH // size)
for step in range(6):
    ids = list(range(4 * step, 4 * step + 4))
    obs.samples(ids, epoch=0)
    tokens, labels = text[ids, :-1][:, piece], text[ids, 1:][:, piece]
    labels = labels.masked_fill(skipped[ids][:, piece], -100)
    positions = torch.arange(LENGTH)[piece]
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = F.cross_entropy(net(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
    opt.zero_grad()
    (loss / count).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
dist.destroy_process_group()
"""

# torch's sharding, with clipping and accumulation.
SHARDED = """
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import entrenar_py

ACCUMULATE, MAX_NORM = int(sys.argv[-1]), 0.3


def clip(params):
    total = torch.nn.utils.get_total_norm([p.grad for p in params], error_if_nonfinite=True)
    total = total.full_tensor()
    for p in params:
        p.grad.mul_(torch.clamp(MAX_NORM / (total + 1e-6), max=1.0))


def main():
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(2)
    x = torch.randn(48, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    obs = entrenar_py.observe(model, opt, clip_norm=MAX_NORM)
    share = 8 // world // ACCUMULATE
    for step in range(6):
        for micro in range(ACCUMULATE):
            first = 8 * step + (micro * world + rank) * share
            ids = list(range(first, first + share))
            obs.samples(ids, epoch=0)
            model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            loss = (model(x[ids]) - 3 * x[ids, :2]).square().mean()
            obs.loss(loss, len(ids))
            (loss / ACCUMULATE).backward()
        obs.reduced()
        clip(params)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
"""

# Weights in 16 bits with masters in 32, written by a thread and read again.
MASTERS = """
import copy
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import entrenar_py

total, folder = int(sys.argv[1]), Path(sys.argv[2])
snapshot = folder / "state.pt"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(32, 5)
net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)


class Masters(torch.optim.Optimizer):
    def __init__(self, params):
        self.live = list(params)
        self.masters = [p.detach().double() for p in self.live]
        super().__init__(self.live, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.live, self.masters):
            group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
            master.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))
            p.copy_(master)


kept = torch.load(snapshot) if snapshot.exists() else {"step": 0}
if kept["step"]:
    net.load_state_dict(kept["net"])
decay = [p for p in net.parameters() if p.ndim > 1]
rest = [p for p in net.parameters() if p.ndim < 2]
opt = Masters(net.parameters())
opt.param_groups.clear()
opt.add_param_group({"params": decay, "lr": 0.1, "weight_decay": 0.3})
opt.add_param_group({"params": rest, "lr": 0.1, "weight_decay": 0.0})
if kept["step"]:
    opt.masters = kept["masters"]
    for group, weight_decay in zip(opt.param_groups, kept["weight_decay"]):
        group["weight_decay"] = weight_decay
obs = entrenar_py.observe(ddp, opt, step=kept["step"])
writer = None
for step in range(kept["step"], total):
    ids = [i for i in range(step % 4 * 8, step % 4 * 8 + 8) if i % world == rank]
    obs.samples(ids, epoch=step // 4)
    loss = (ddp(x[ids]) - x[ids].norm(dim=1, keepdim=True)).abs().mean()
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
    opt.param_groups[0]["weight_decay"] *= 0.8
    state = {
        "step": step + 1,
        "net": net.state_dict(),
        "masters": opt.masters,
        "weight_decay": [g["weight_decay"] for g in opt.param_groups],
    }
    if rank == 0:
        state = copy.deepcopy(state)
        writer = threading.Thread(target=torch.save, args=(state, snapshot))
        writer.start()
        writer.join()
    dist.barrier()
dist.destroy_process_group()
"""
