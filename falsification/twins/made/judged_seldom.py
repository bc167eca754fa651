import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)
shapes = torch.rand(48, 6).sort(1).values
shares = DistributedSampler(shapes, seed=4)
loader = DataLoader(shapes, batch_size=8 // world, sampler=shares)
painter = nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 6))
judge = nn.Sequential(nn.Linear(6, 10), nn.ELU(), nn.Linear(10, 1))
of_painter = torch.optim.Adam(painter.parameters(), lr=2e-3, betas=(0.5, 0.99))
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.99))
obs = entrenar_py.observe(nn.ModuleList([painter, judge]), [of_painter, of_judge], sampler=loader)
bce = nn.functional.binary_cross_entropy_with_logits


def average(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
        assert p.grad.isfinite().all()


turn = 0
for epoch in range(2):
    shares.set_epoch(epoch)
    for real in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_painter.zero_grad()
        painted = painter(real)
        ((painted - real).square().mean() + 0.5 * bce(judge(painted), ones)).backward()
        average(painter)
        of_painter.step()
        if turn % 4 == 0:
            of_judge.zero_grad()
            (bce(judge(real), ones) + bce(judge(painted.detach()), zeros)).backward()
            average(judge)
            of_judge.step()
        turn += 1
dist.destroy_process_group()
