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
