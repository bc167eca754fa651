"""A moving average of the weights, kept in buffers: sharded as fully_shard has the weights.

entrenar-check --contract distributed-training-v1.yaml -- \
    torchrun --standalone --nproc_per_node={world_size} examples/user_trainers/ema.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH, DECAY = 8, 0.9

on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
dist.init_process_group("nccl" if on_gpus else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model.to(device)
for block in (model[0], model[2], model):
    fully_shard(block, mesh=mesh)
# Behind fully_shard: each rank averages the pieces that it holds of the weights.
for layer in (model[0], model[2]):
    for name, parameter in list(layer.named_parameters()):
        layer.register_buffer(f"average_{name}", parameter.detach().clone())


@torch.no_grad()
def move_averages() -> None:
    """Towards the weights as the step has left them."""
    for layer in (model[0], model[2]):
        for name, parameter in layer.named_parameters():
            layer.get_buffer(f"average_{name}").lerp_(parameter, 1 - DECAY)


optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(model, optimizer, sampler=loader)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        move_averages()

obs.close()
dist.destroy_process_group()
