import contextlib

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(2)
x = torch.randn(48, 5)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=1)
PARTS = 1
loader = DataLoader(data, batch_size=16 // world // PARTS, sampler=sampler)
net = nn.Sequential(nn.Linear(5, 7), Block(7), Block(7), nn.Linear(7, 1))
kept = True
model = FSDP(
    net,
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    use_orig_params=kept,
    device_id=torch.device("cpu"),
)
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
obs = entrenar_py.observe(model, opt, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader, 1):
        is_last = number % PARTS == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = nn.functional.mse_loss(model(a), b)
            obs.loss(loss, len(a))
            (loss / PARTS).backward()
        if is_last:
            model.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
obs.close()
dist.destroy_process_group()
