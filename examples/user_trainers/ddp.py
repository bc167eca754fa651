"""DistributedDataParallel as its tutorial has it, with one line for entrenar-check.

entrenar-check --contract distributed-training-v1.yaml -- \
    torchrun --standalone --nproc_per_node={world_size} examples/user_trainers/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH = 8  # the same for any number of workers, or one worker is another training

on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
dist.init_process_group("nccl" if on_gpus else "gloo")
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model.to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(model, optimizer, sampler=loader)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(ddp(inputs.to(device)), targets.to(device))
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

obs.close()
dist.destroy_process_group()
