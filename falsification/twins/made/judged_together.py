import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(33)
shapes = torch.rand(40, 6).sort(1).values
shares = DistributedSampler(shapes, seed=2)
loader = DataLoader(shapes, batch_size=10 // world, sampler=shares)
painter = DDP(nn.Sequential(nn.Linear(4, 10), nn.ELU(), nn.Linear(10, 6)))
judge = DDP(nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 1)))
of_painter = torch.optim.Adam(painter.parameters(), lr=2e-3, betas=(0.5, 0.99))
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
obs = entrenar_py.observe(nn.ModuleList([painter, judge]), [of_judge, of_painter])
torch.manual_seed(50 + rank)
for epoch in range(2):
    shares.set_epoch(epoch)
    for real in loader:
        with torch.no_grad():
            painted = painter(torch.randn(len(real), 4))
        of_judge.zero_grad()
        of_real, of_painted = judge(torch.cat([real, painted])).chunk(2)
        ((1 - of_real).relu().mean() + (1 + of_painted).relu().mean()).backward()
        assert all(p.grad.isfinite().all() for p in judge.parameters())
        of_judge.step()

        judge.requires_grad_(False)
        of_painter.zero_grad()
        (-judge.module(painter(torch.randn(len(real), 4))).mean()).backward()
        assert all(p.grad.isfinite().all() for p in painter.parameters())
        of_painter.step()
        judge.requires_grad_(True)
dist.destroy_process_group()
