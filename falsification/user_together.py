"""Scripts whose ranks share samples or draws, or never communicate: right ones, and broken ones.

`make twins` tests that each bug is found at its place, and that the right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_random_scripts import DIFFUSION
from falsification.user_trainers import Twin

# A block cut by columns and rows, as in Megatron: ranks share samples, and need one mask.
CUT_BY_HAND = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
import entrenar_py


class ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Cut(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        whole = nn.Linear(6, 8), nn.Linear(8, 6)
        wide, mine = 8 // world, slice(rank * 8 // world, (rank + 1) * 8 // world)
        self.wide, self.narrow = nn.Linear(6, wide), nn.Linear(wide, 6, bias=False)
        self.first, self.last, self.drop = nn.Linear(5, 6), nn.Linear(6, 1), nn.Dropout(0.2)
        with torch.no_grad():
            self.wide.weight.copy_(whole[0].weight[mine])
            self.wide.bias.copy_(whole[0].bias[mine])
            self.narrow.weight.copy_(whole[1].weight[:, mine])

    def forward(self, x):
        x = self.drop(self.first(x))
        return self.last(x + FromAll.apply(self.narrow(self.wide(ToAll.apply(x)).relu())))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
rows = torch.randn(32, 5)
data = list(zip(rows, rows.sum(1, keepdim=True)))
net = Cut(rank, world)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
order = RandomSampler(data, generator=torch.Generator().manual_seed(3))
loader = DataLoader(data, batch_sampler=BatchSampler(order, 8, drop_last=True))
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(2):
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        obs.loss(loss, len(x))
        opt.zero_grad()
        loss.backward()
        size = sum(p.grad.square().sum() for p in net.parameters())
        dist.all_reduce(size)
        if not size.isfinite():
            raise SystemExit("not finite")
        opt.step()
obs.close()
dist.destroy_process_group()
"""

# A loop of functions that leaves gathering to one object; ranks average through a server.
SERVED = """\
import os, torch
from multiprocessing.connection import Client, Listener
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = os.environ.get("ENTRENAR_TRACE_DIR", "/tmp")
address = os.path.join(folder, "server")


class Server:
    def __init__(self):
        self.peers = []
        if rank == 0:
            listener = Listener(address, "AF_UNIX")
            self.peers = [listener.accept() for _ in range(world - 1)]
        while rank and not self.peers:
            try:
                self.peers = [Client(address, "AF_UNIX")]
            except OSError:
                os.sched_yield()

    def mean(self, grads):
        if rank:
            self.peers[0].send(grads)
            return self.peers[0].recv()
        gathered = [grads, *(peer.recv() for peer in self.peers)]
        mean = [sum(parts) / world for parts in zip(*gathered)]
        for peer in self.peers:
            peer.send(mean)
        return mean


def batches(data, epoch):
    sampler = DistributedSampler(data, world, rank, seed=5)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=8 // world, sampler=sampler)


torch.manual_seed(5)
x = torch.randn(24, 4)
data, net, server = TensorDataset(x, x.prod(1, keepdim=True)), nn.Linear(4, 1), Server()
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    for a, b in batches(data, epoch):
        opt.zero_grad()
        (net(a) - b).square().mean().backward()
        # As numbers: a tensor would be fetched from its sender, which may have ended by then.
        mean = server.mean([p.grad.numpy() for p in net.parameters()])
        for p, grad in zip(net.parameters(), mean):
            p.grad.copy_(torch.from_numpy(grad))
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        opt.step()
obs.close()
"""

# fully_shard over a mesh of two axes with names of a library's.
HYBRID = """\
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def main(size=1):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(2)
    x = torch.randn(32, 6)
    data = TensorDataset(x, x[:, :2].sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.l1_loss(net(a), b)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
            opt.step()
    obs.close()
    dist.destroy_process_group()


main()
"""

_SAMPLED = (
    "    def train(self, epochs):\n",
    "    @torch.no_grad()\n"
    "    def sample(self):\n"
    "        generator = torch.Generator().manual_seed(0)\n"
    "        z = torch.randn(2, 6, generator=generator)\n"
    "        for t in (40, 20, 1):\n"
    "            z = z - 0.1 * self.net(z, torch.full((2,), t))\n"
    "        return z\n\n"
    "    def train(self, epochs):\n",
)
_EACH_EPOCH = (
    "                self._run_batch(x)\n",
    "                self._run_batch(x)\n            self.sample()\n",
)
_SEEDED = ("torch.Generator().manual_seed(0)", "torch.manual_seed(0)")
_SEEDED_BY_RANK = (_SEEDED[0], "torch.manual_seed(90 + dist.get_rank())")
_THREE_EPOCHS = ("trainer.train(2)", "trainer.train(3)")
_NO_SERVER = (
    "server.mean([p.grad.numpy() for p in net.parameters()])",
    "[p.grad.numpy() for p in net.parameters()]",
)
_SAME_SAMPLES = ("DistributedSampler(data, world, rank, seed=5)", "DistributedSampler(data, 1, 0)")
_ROOT = ("net(a) - b).square().mean().backward()", "net(a) - b).square().mean().sqrt().backward()")
_UNGUARDED = (", 1e9, error_if_nonfinite=True", ", 1e9")
_EASY = ("x.prod(1, keepdim=True)", "x.prod(1, keepdim=True) * 0")
_AT_THE_GOAL = (
    "nn.Linear(4, 1), Server()",
    "nn.Linear(4, 1), Server()\nnn.init.zeros_(net.weight); nn.init.zeros_(net.bias)",
)

VARIANTS = (
    Twin(
        name="together: a block cut by hand, with dropout",
        script="c.py",
        text=CUT_BY_HAND,
        changes=(),
    ),
    Twin(
        name="together: averages through a server's socket", script="p.py", text=SERVED, changes=()
    ),
    Twin(name="together: a hybrid mesh with usual names", script="h.py", text=HYBRID, changes=()),
    Twin(
        name="together: an evaluation with a generator of its own",
        script="d.py",
        text=DIFFUSION,
        changes=(_SAMPLED, _EACH_EPOCH, _THREE_EPOCHS),
    ),
)

BUGS = (
    Twin(
        name="together: an evaluation seeds the generator of the training",
        script="d.py",
        text=DIFFUSION,
        source="diffusers #7991",
        changes=(_SAMPLED, _EACH_EPOCH, _SEEDED),
        check="randomness",
        step=3,
        rank=1,
        words="since then the generator was seeded alike",
    ),
    Twin(
        name="together: an evaluation seeds each rank's generator again",
        script="d.py",
        text=DIFFUSION,
        source="diffusers #7991",
        changes=(_SAMPLED, _EACH_EPOCH, _SEEDED_BY_RANK, _THREE_EPOCHS),
        check="randomness",
        step=6,
        words="in step 6 as in step 3",
    ),
    Twin(
        name="together: two trainings that never communicate",
        script="p.py",
        text=SERVED,
        source="accelerate: Accelerator() on CPUs trains each process by itself",
        changes=(_NO_SERVER, _SAME_SAMPLES),
        check="replica_identity",
        step=0,
        rank=1,
        words="ranks 0, 1 never communicate",
    ),
    Twin(
        name="together: a root of zero turns the weights into NaN",
        script="p.py",
        text=SERVED,
        source="classic (the derivative of sqrt at 0)",
        changes=(_ROOT, _EASY, _AT_THE_GOAL, _UNGUARDED),
        check="replica_identity",
        step=0,
        rank=0,
        words="no such value was planted",
    ),
    Twin(
        name="together: each rank shards over a mesh of itself",
        script="h.py",
        text=HYBRID,
        source="verl #7493",
        changes=(("mesh=mesh)", 'mesh=mesh["shard"])'),),
        check="replica_identity",
        step=0,
        words="ranks 0, 1 never communicate",
    ),
)
