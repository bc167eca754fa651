# Goes on by itself from last.pt in its own folder, which a thread writes every second step.
import os
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

STEPS, BATCHES = 9, 3


class Feed:
    def __init__(self):
        self.handed_out = 0

    def epoch(self, number):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(number)).tolist()
        for at in range(self.handed_out, BATCHES):
            self.handed_out = at + 1
            yield number, order[8 * at : 8 * at + 8][rank::world]
        self.handed_out = 0


class Writer(threading.Thread):
    # `go` stands for a busy disk: the file is written while the next step is made.
    def __init__(self, kept):
        super().__init__()
        self.kept, self.go = kept, threading.Event()
        self.start()

    def run(self):
        self.go.wait()
        torch.save(self.kept, "last.pt.new")
        os.replace("last.pt.new", "last.pt")


def copied(state):
    return torch.utils._pytree.tree_map(
        lambda held: held.clone() if isinstance(held, torch.Tensor) else held, state
    )


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
inputs = torch.randn(24, 4)
feed, step, writer = Feed(), 0, None
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    whole.load_state_dict(kept["whole"])
    optimizer.load_state_dict(kept["optimizer"])
    step = kept["step"]
    feed.handed_out = kept["handed_out"] % BATCHES
obs = entrenar_py.observe(model, optimizer, step=step)
epoch = step // BATCHES
while step < STEPS:
    for number, ids in feed.epoch(epoch):
        loss = model(inputs[ids]).square().mean()
        obs.samples(ids, epoch=number)
        obs.loss(loss, len(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and writer:
            writer.go.set()
            writer.join()
            writer = None
        if rank == 0 and step % 2 == 0:
            state = {"whole": whole.state_dict(), "optimizer": optimizer.state_dict()}
            place = {"step": step, "handed_out": feed.handed_out}
            writer = Writer({**copied(state), **place})
        dist.barrier()
    epoch += 1
if writer:
    writer.go.set()
    writer.join()
dist.destroy_process_group()
