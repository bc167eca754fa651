"""Texts of scripts that stop and resume: `user_resumes` lists the bugs that are planted in them."""

from __future__ import annotations

NANOGPT = """\
# One file, settings at its head, ckpt.pt, and batches drawn at random positions.
import os
import sys

import numpy as np
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

max_iters = int(sys.argv[1])
out_dir = sys.argv[2]
batch_size = 4
learning_rate = 1e-2
lr_decay_iters = 20
grad_clip = 1.0
init_from = "resume" if os.path.exists(os.path.join(out_dir, "ckpt.pt")) else "scratch"

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)

stream = np.random.RandomState(0).randn(200).astype(np.float32)


class Positions:
    replacement = True

    def __init__(self):
        self.drawn = []

    def __iter__(self):
        return iter(self.drawn)


def get_batch():
    ix = torch.randint(len(stream) - 9, (batch_size // world_size,))
    x = torch.stack([torch.from_numpy(stream[i : i + 8]) for i in ix])
    y = torch.stack([torch.from_numpy(stream[i + 8 : i + 9]) for i in ix])
    obs.samples(ix.tolist())
    return x, y


iter_num = 0
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), weights_only=False)
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"][ddp_rank])
    checkpoint = None
raw_model = model
model = DDP(model)
obs = entrenar_py.observe(model, optimizer, sampler=Positions(), step=iter_num)


def get_lr(it):
    return learning_rate * (1.0 - it / lr_decay_iters)


while iter_num < max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    X, Y = get_batch()
    loss = torch.nn.functional.mse_loss(model(X), Y)
    obs.loss(loss, len(X))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    assert norm.isfinite()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    states = [None] * world_size
    torch.distributed.all_gather_object(states, torch.get_rng_state())
    if master_process:
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
            "rng": states,
        }
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
obs.close()
destroy_process_group()
"""

SNAPSHOT = """\
# A Trainer class with _run_batch, _save_snapshot and _load_snapshot.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import entrenar_py


class ToyData(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 5, generator=generator)
        self.y = self.x @ torch.arange(5.0)[:, None] / 5

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 6)
        self.mid = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.mid(torch.tanh(self.body(x)))))


class Trainer:
    def __init__(self, model, loader, optimizer, scheduler, scaler, path, save_every, limit):
        self.gpu_id = int(os.environ["RANK"])
        self.loader = loader
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.save_every = save_every
        self.limit = limit
        self.path = path
        self.global_step = 0
        self.raw = model
        if os.path.exists(path):
            self._load_snapshot()
        self.model = DDP(model)
        self.obs = entrenar_py.observe(
            self.model, optimizer, sampler=loader, step=self.global_step
        )

    def _load_snapshot(self):
        snapshot = torch.load(self.path, weights_only=False)
        self.raw.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIM"])
        self.scheduler.load_state_dict(snapshot["SCHED"])
        self.scaler.load_state_dict(snapshot["SCALER"])
        self.global_step = snapshot["STEP"]

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.raw.state_dict(),
            "OPTIM": self.optimizer.state_dict(),
            "SCHED": self.scheduler.state_dict(),
            "SCALER": self.scaler.state_dict(),
            "STEP": self.global_step,
        }
        torch.save(snapshot, self.path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.global_step += 1
        if self.global_step % self.save_every == 0 and self.gpu_id == 0:
            self._save_snapshot()

    def _run_epoch(self, epoch, skip):
        self.loader.sampler.set_epoch(epoch)
        for index, (source, targets) in enumerate(self.loader):
            if index < skip:
                continue
            if self.global_step >= self.limit:
                return
            self._run_batch(source, targets)

    def train(self):
        while self.global_step < self.limit:
            epoch, skip = divmod(self.global_step, len(self.loader))
            self._run_epoch(epoch, skip)
        self.obs.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int)
    parser.add_argument("--snapshot-dir")
    parser.add_argument("--save-every", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = ToyData(20)
    loader = DataLoader(
        data, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(data)
    )
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.body.parameters(), *model.mid.parameters()], "lr": 0.01},
            {"params": model.head.parameters(), "lr": 0.002, "weight_decay": 0.0},
        ]
    )
    warm = lambda step: min(1.0, (step + 1) / 3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [warm, lambda step: 0.8**step])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    path = os.path.join(args.snapshot_dir, "snapshot.pt")
    Trainer(
        model, loader, optimizer, scheduler, scaler, path, args.save_every, args.total_steps
    ).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

FOLDERS = """\
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
"""
