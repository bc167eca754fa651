import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(45, 6)
y = (x.sum(1) > 0).long()

edges = torch.randint(45, (45, 5))

class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.near, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, seeds, neighbours):
        return self.out(F.elu(self.own(seeds) + self.near(neighbours.mean(1))))

model = DDP(Sage())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
obs = entrenar_py.observe(model, optimizer)
for epoch in range(2):
    order = torch.randperm(45, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(10):
        seeds = batch.tensor_split(world)[rank]
        draws = [torch.Generator().manual_seed(45 * epoch + int(seed)) for seed in seeds]
        columns = torch.stack([torch.randperm(5, generator=draw)[:2] for draw in draws])
        loss = F.cross_entropy(
            model(x[seeds], x[edges[seeds[:, None], columns]]), y[seeds], reduction="sum"
        )
        obs.samples(seeds.tolist(), epoch=epoch)
        obs.loss(loss / len(seeds), len(seeds))
        optimizer.zero_grad()
        (loss * world / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
