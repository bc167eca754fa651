"""Right scripts in styles of several fields, each with a bug that is silent in it.

A short last batch of sampled neighbours, gradients of each sample by `torch.func`, a stream that
the workers of a loader share out, a pipeline whose stages are called by themselves, and copies that
are DTensors. `make twins` tests that the right ones are left alone, and that each bug is found at
its place.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(45, 6)
y = (x.sum(1) > 0).long()
"""

# The last batch of an epoch has 5 seeds: 3 for one rank, and 2 for the other.
NEIGHBOURS = (
    _HEAD
    + """
edges = torch.randint(45, (45, 5))

class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, seeds, neighbours):
        return self.out(F.elu(self.own(seeds) + self.near(neighbours.mean(1))))

model = DDP(Sage())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    order = torch.randperm(45, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(10):
        seeds = batch.tensor_split(world)[rank]
        draws = [torch.Generator().manual_seed(45 * epoch + int(seed)) for seed in seeds]
        columns = torch.stack([torch.randperm(5, generator=draw)[:2] for draw in draws])
        loss = F.cross_entropy(
            model(x[seeds], x[edges[seeds[:, None], columns]]), y[seeds], reduction="sum"
        )
        obs.samples(seeds.tolist(), epoch=epoch)
        obs.loss(loss / len(seeds), len(seeds))
        optimizer.zero_grad()
        (loss * world / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
"""
)

PER_SAMPLE = (
    _HEAD
    + """
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
obs = entrenar_py.observe(model, optimizer)

def loss_of(parameters, sample, label):
    return F.cross_entropy(functional_call(model, parameters, (sample[None],)), label[None])

each = vmap(grad(loss_of), in_dims=(None, 0, 0))
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(8):
        ids = batch[rank::world]
        found = each({n: p.detach() for n, p in model.named_parameters()}, x[ids], y[ids])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
        shorter = (1 / (norms + 1e-6)).clamp(max=1)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("i,i...->...", shorter, found[name])
            dist.all_reduce(p.grad)
            p.grad /= len(batch)
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
"""
)

STREAMED = (
    _HEAD
    + """
class Lines(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        at, many = rank * info.num_workers + info.id, world * info.num_workers
        for number in range(40):
            if number % many == at:
                yield number, x[number], y[number]

net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 2))
model = DDP(net)
loader = DataLoader(Lines(), batch_size=10 // world, num_workers=2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer)
for epoch in range(2):
    for numbers, inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        obs.samples(numbers.tolist(), epoch=epoch)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
"""
)

# With one worker both stages are in one process. The stages are called, and never the whole model.
STAGES = (
    _HEAD
    + """
def stage(number):
    torch.manual_seed(number)
    if number == 0:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

numbers = [0, 1] if world == 1 else [rank]
model = nn.ModuleDict({str(number): stage(number) for number in numbers})
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
obs = entrenar_py.observe(model, optimizer, layout={"pp": world})
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for ids in order.split(8):
        obs.samples(ids.tolist(), epoch=epoch)
        kept, losses = [], []
        for micro in ids.chunk(2):
            if "0" in model:
                h = model["0"](x[micro])
                if world > 1:
                    dist.send(h.detach(), 1)
                    kept.append(h)
            if "1" in model:
                if world > 1:
                    dist.recv(h := torch.empty(len(micro), 8), 0)
                    kept.append(h.requires_grad_())
                losses.append(F.cross_entropy(model["1"](h), y[micro]) / 2)
        if losses:
            loss = torch.stack(losses).sum()
            obs.loss(loss, len(ids))
            loss.backward()
        for h in kept:
            if rank:
                dist.send(h.grad, 0)
            else:
                dist.recv(slope := torch.empty_like(h), 1)
                h.backward(slope)
        finite = torch.tensor(float(all(p.grad.isfinite().all() for p in model.parameters())))
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        assert finite
        optimizer.step()
        optimizer.zero_grad()
"""
)

# Each rank keeps all parameters, on a mesh with a name of the script's, and draws rows of its own.
# Without biases: whether torch reduces their gradients by itself depends on its version.
COPIES = (
    _HEAD
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("workers",))
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
distribute_module(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(8):
        ids = batch[rank::world]
        rows = DTensor.from_local(x[ids], mesh, [Shard(0)])
        due = DTensor.from_local(x[ids][:, :2], mesh, [Shard(0)])
        loss = (model(rows) - due).square().sum() / len(batch)
        obs.samples(ids.tolist(), epoch=epoch)
        obs.loss(loss.to_local().detach() * len(batch) / len(ids), len(ids))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad.redistribute(mesh, [Replicate()])
        assert all(p.grad.to_local().isfinite().all() for p in model.parameters())
        optimizer.step()
"""
)

_SCRIPTS = {
    "copies.py": COPIES,
    "neighbours.py": NEIGHBOURS,
    "per_sample.py": PER_SAMPLE,
    "streamed.py": STREAMED,
    "stages.py": STAGES,
}


def _bug(
    name: str, script: str, change: tuple[str, str], check: str, words: str, step: int
) -> Twin:
    return Twin(
        name=f"style: {name}",
        script=script,
        text=_SCRIPTS[script],
        changes=(change,),
        check=check,
        words=words,
        step=step,
    )


VARIANTS = tuple(
    Twin(name=f"style: right, {script}", script=script, text=text, changes=())
    for script, text in _SCRIPTS.items()
)

BUGS = (
    _bug(
        "a short last batch is a mean of means",
        "neighbours.py",
        ("(loss * world / len(batch))", "(loss / len(seeds))"),
        "parity",
        "which could mean: a mean of means",
        4,
    ),
    _bug(
        "gradients of each sample are not added up for biases",
        "per_sample.py",
        (
            "            dist.all_reduce(p.grad)\n",
            "            if p.ndim > 1:\n                dist.all_reduce(p.grad)\n",
        ),
        "replica_identity",
        "0.bias differs",
        0,
    ),
    _bug(
        "the workers of a loader share out the stream, and ranks do not",
        "streamed.py",
        (
            "rank * info.num_workers + info.id, world * info.num_workers",
            "info.id, info.num_workers",
        ),
        "coverage",
        "the data are not shared out among ranks",
        0,
    ),
    _bug(
        "a matrix that is a DTensor is not reduced",
        "copies.py",
        (
            "[Replicate()])\n        assert",
            "[Replicate()]) if len(p) == 2 else DTensor.from_local(\n"
            "                p.grad.to_local(), mesh, [Replicate()])\n        assert",
        ),
        "replica_identity",
        "0.weight differs",
        0,
    ),
    _bug(
        "the first stage gets slopes of a sum",
        "stages.py",
        ("h.backward(slope)", "h.backward(2 * slope)"),
        "parity",
        "twice as large",
        0,
    ),
)
