"""Checkpoints every step and goes on from the last one, in the middle of an epoch too.

entrenar-check --contract training-integrity-v1.yaml -- torchrun --standalone \
    --nproc_per_node={world_size} examples/user_trainers/resume.py --steps {steps} --dir {workdir}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH = 8

cli = argparse.ArgumentParser()
cli.add_argument("--steps", type=int, default=8)
cli.add_argument("--dir", type=Path, required=True)
given = cli.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(24, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

step, checkpoint = 0, given.dir / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    step = saved["step"]
obs = entrenar_py.observe(model, optimizer, sampler=loader, step=step)

while step < given.steps:
    epoch, done = divmod(step, len(loader))
    sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(loader):
        if index < done or step == given.steps:
            continue
        loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        step += 1
        if dist.get_rank() == 0:
            states = {"model": model, "optimizer": optimizer, "schedule": schedule}
            fresh = checkpoint.with_suffix(".new")
            torch.save({"step": step, **{k: v.state_dict() for k, v in states.items()}}, fresh)
            fresh.replace(checkpoint)  # whoever dies meanwhile leaves the old one whole

obs.close()
dist.destroy_process_group()
