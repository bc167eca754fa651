# Functions, and a folder for each checkpoint, to which every rank writes.
import pathlib
import random
import sys

import numpy as np
import torch
import torch.distributed as dist

import entrenar_py

STEPS, ROOT = int(sys.argv[1]), pathlib.Path(sys.argv[2])
EVERY = int(sys.argv[3]) if len(sys.argv) > 3 else 1
BATCH, ACCUMULATE, N = 8, 2, 24


def make():
    torch.manual_seed(11)
    net = torch.nn.ModuleDict(
        {
            "first": torch.nn.Linear(4, 4),
            "second": torch.nn.Linear(4, 4),
            "last": torch.nn.Linear(4, 1),
        }
    )
    net.register_buffer("ema", torch.zeros(4, 4))
    net["drop"] = torch.nn.Dropout(0.1)
    return net


def run(net, x):
    hidden = torch.relu(net["first"](x))
    return net["last"](net["drop"](torch.relu(net["second"](hidden)))).squeeze(-1)


class Whole(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return run(self.net, x)


def batches(epoch, rank, world):
    order = np.random.default_rng(epoch).permutation(N)
    for at in range(0, N, BATCH):
        mine = order[at : at + BATCH][rank::world]
        yield np.array_split(mine, ACCUMULATE)


def save(step, whole, optimizer, rank):
    folder = ROOT / f"step-{step:08}"
    folder.mkdir(exist_ok=True, parents=True)
    state = {
        "net": whole.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    torch.save(state, folder / f"rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        (ROOT / "latest").write_text(folder.name)
    dist.barrier()


def load(whole, optimizer, rank):
    folder = ROOT / (ROOT / "latest").read_text()
    state = torch.load(folder / f"rank{rank}.pt", weights_only=False)
    whole.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    return int(folder.name.removeprefix("step-"))


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    table = torch.randn(N, 4, generator=torch.Generator().manual_seed(5))
    whole = Whole(make())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)
    step = load(whole, optimizer, rank) if (ROOT / "latest").exists() else 0
    obs = entrenar_py.observe(whole, optimizer, step=step)
    per_epoch = N // BATCH
    while step < STEPS:
        epoch, done = divmod(step, per_epoch)
        for index, parts in enumerate(batches(epoch, rank, world)):
            if index < done or step == STEPS:
                continue
            for ids in parts:
                obs.samples(ids.tolist(), epoch=epoch)
                x = table[ids]
                loss = torch.nn.functional.mse_loss(whole(x), x.sum(1), reduction="sum")
                obs.loss(loss / len(ids), len(ids))
                (loss / BATCH).backward()
            for parameter in whole.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            whole.net.ema.lerp_(whole.net["first"].weight.detach(), 0.2)
            step += 1
            if step % EVERY == 0:
                save(step, whole, optimizer, rank)
    obs.close()
    dist.destroy_process_group()


train()
