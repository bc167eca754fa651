"""Right scripts that seed nothing, and the same with a bug: their runs begin with other weights.

Nobody seeds these scripts, as in torch's own tutorials: DistributedDataParallel, or a broadcast,
sees to it that ranks begin alike. Each rank draws a data set of its own in one of them.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# As torch's tutorial on torchrun has it, with dropout and accumulation.
TUTORIAL = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import entrenar_py


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(6), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.obs = entrenar_py.observe(model, optimizer, sampler=train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        self.optimizer.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                self._run_batch(source, targets)
        self.obs.close()


dist.init_process_group("gloo")
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
)
dataset = MyTrainDataset(32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(
    dataset, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(dataset)
)
Trainer(model, loader, optimizer).train(2)
dist.destroy_process_group()
"""

# No wrapper: rank 0's weights and numpy's order, which one rank draws for all.
BROADCAST = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
table = torch.linspace(-1, 1, 32 * 4).sin().view(32, 4)
goal = table.square().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
for p in net.parameters():
    dist.broadcast(p.data, 0)
opt = torch.optim.AdamW(net.parameters(), lr=0.02)
obs = entrenar_py.observe(net, opt)
rng = np.random.default_rng()
for epoch in range(2):
    order = torch.from_numpy(rng.permutation(32))
    dist.broadcast(order, 0)
    for at in range(0, 32, 8):
        mine = order[at:at + 8][rank::world]
        obs.samples(mine.tolist(), epoch=epoch)
        loss = (net(table[mine]) - goal[mine]).square().sum() / 8
        obs.loss((net(table[mine]).detach() - goal[mine]).square().mean(), len(mine))
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
obs.close()
dist.destroy_process_group()
"""

_WANTED = ("coverage", "parity", "randomness", "replica_identity", "step_rule", "weighting")


def _twin(name: str, text: str, *changes: tuple[str, str], **fields: object) -> Twin:
    return Twin(
        name=f"unseeded: {name}",
        script="train.py",
        text=text,
        changes=changes,
        **fields,  # type: ignore[arg-type]
    )


VARIANTS = (
    _twin("a tutorial, whose ranks draw data of their own", TUTORIAL, wanted=_WANTED),
    _twin("weights and order are broadcast", BROADCAST, wanted=(*_WANTED, "determinism")),
    _twin(
        "an order by Python's generator, and by a seed that one rank asks for",
        BROADCAST,
        ("import numpy as np\n", "import random\n"),
        ("rng = np.random.default_rng()\n", "random.seed()\n"),
        ("torch.from_numpy(rng.permutation(32))", "torch.tensor(random.sample(range(32), 32))"),
        wanted=(*_WANTED, "determinism"),
    ),
)
BUGS = (
    _twin(
        "ranks begin with weights of their own",
        BROADCAST,
        ("    dist.broadcast(p.data, 0)\n", "    pass\n"),
        check="replica_identity",
        step=-1,
        rank=1,
    ),
    _twin(
        "each rank is seeded by the time",
        BROADCAST,
        ("net = nn", "torch.manual_seed(__import__('time').time_ns() % 2**31 + rank)\nnet = nn"),
        ("    dist.broadcast(p.data, 0)\n", "    pass\n"),
        check="replica_identity",
        step=-1,
        rank=1,
    ),
    _twin(
        "each rank draws an order of its own",
        BROADCAST,
        ("    dist.broadcast(order, 0)\n", ""),
        check="coverage",
    ),
    _twin(
        "each rank's loader shuffles",
        TUTORIAL,
        ("torch.rand(6), torch.rand(1)", "torch.randn(6, generator=rng), torch.ones(1)"),
        (
            "        self.data = ",
            "        rng = torch.Generator().manual_seed(1)\n        self.data = ",
        ),
        ("sampler=DistributedSampler(dataset)", "shuffle=True"),
        ("            self.train_data.sampler.set_epoch(epoch)\n", ""),
        check="coverage",
    ),
    _twin(
        "the wrapper is bypassed",
        TUTORIAL,
        ("self.model(source)", "self.model.module(source)"),
        check="replica_identity",
        step=0,
        rank=1,
    ),
    _twin(
        "means are added up over ranks",
        BROADCAST,
        ("square().sum() / 8", "square().mean()"),
        check="parity",
        step=0,
    ),
    _twin(
        "the wrapper's mean is divided by the ranks again",
        TUTORIAL,
        (
            "        self.optimizer.step()\n",
            "        for p in self.model.parameters():\n"
            "            p.grad /= dist.get_world_size()\n"
            "        self.optimizer.step()\n",
        ),
        check="parity",
        step=0,
    ),
)
