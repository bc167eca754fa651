import collections, itertools, queue, threading
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Sines(Dataset):
    def __init__(self, n):
        self.t = torch.linspace(0, 6, n)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return {"t": self.t[i].reshape(1), "y": self.t[i].sin().reshape(1)}


dist.init_process_group("gloo")
W = dist.get_world_size()
torch.manual_seed(42)
SIZE, BATCH = 24, 8
data = Sines(SIZE)
sampler = DistributedSampler(data, seed=9, drop_last=False)
loader = DataLoader(data, batch_size=BATCH // W, sampler=sampler)
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.SGD(ddp.parameters(), lr=0.05, nesterov=True, momentum=0.8)
obs = entrenar_py.observe(ddp, optim, sampler=loader)


def step(batch):
    optim.zero_grad(set_to_none=True)
    backward(batch)
    update()


def backward(batch, scale=1.0):
    loss = nn.functional.mse_loss(ddp(batch["t"]), batch["y"])
    obs.loss(loss, len(batch["t"]))
    (loss * scale).backward()


def update():
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
    if not torch.isfinite(norm):
        raise ValueError(f"norm {norm}")
    optim.step()


def epochs(n=2):
    for e in range(n):
        sampler.set_epoch(e)
        yield e


for _ in epochs():
    for big in loader:
        optim.zero_grad()
        for t, y in zip(big["t"].chunk(2), big["y"].chunk(2)):
            backward({"t": t, "y": y}, 0.5)
        update()

obs.close()
dist.destroy_process_group()
