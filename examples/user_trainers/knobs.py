"""Micro-batches of unequal weight, clipping and a scaled loss, each a knob that can be turned.

entrenar-check --contract distributed-training-v1.yaml -- torchrun --standalone \
    --nproc_per_node={world_size} examples/user_trainers/knobs.py --accumulation {accumulation} \
    --clip {clip} --loss-scale {loss_scale} --permute {permute} --ddp {strategy}
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH = 16

cli = argparse.ArgumentParser()
cli.add_argument("--accumulation", type=int, default=1)
cli.add_argument("--clip", type=float, default=1.0)
cli.add_argument("--loss-scale", type=float, default=1.0)
cli.add_argument("--permute", type=int, default=0)
cli.add_argument("--ddp", choices=("on", "off"), default="on")
given = cli.parse_args()

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
# A sample counts as often as it has tokens: from one to five times.
data = TensorDataset(torch.arange(32), x, x.sum(1, keepdim=True), 1.0 + torch.arange(32) % 5)
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model) if given.ddp == "on" else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(model, optimizer)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        batch = [one.flip(0) for one in batch] if given.permute else batch
        total = batch[3].sum()
        dist.all_reduce(total)
        micro_batches = list(zip(*(one.chunk(given.accumulation) for one in batch), strict=True))
        for number, (ids, inputs, targets, weights) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            obs.samples(ids, epoch=epoch)
            with ddp.no_sync() if ddp is not None and not last else nullcontext():
                errors = (ddp or model)(inputs) - targets
                loss = (weights * errors.square().squeeze(1)).sum()
                obs.loss(loss / weights.sum(), weights.sum())
                # DistributedDataParallel divides by the number of workers.
                (given.loss_scale * loss * world_size / total).backward()
        for parameter in model.parameters():
            if ddp is None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            parameter.grad /= given.loss_scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()

obs.close()
dist.destroy_process_group()
