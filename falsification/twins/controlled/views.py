import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        parts = [torch.empty_like(features) for _ in range(world)]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]


def contrast(first, second):
    alike = F.normalize(Gather.apply(first)) @ F.normalize(Gather.apply(second)).T / 0.4
    return F.cross_entropy(alike, torch.arange(len(alike)))


torch.manual_seed(9)
x = torch.randn(32, 6)
encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
torch.manual_seed(90 + rank)
data = TensorDataset(x)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
ddp = DDP(encoder)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
obs = entrenar_py.observe(encoder, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        views = torch.cat([batch + 0.2 * torch.randn_like(batch) for _ in range(2)])
        loss = contrast(*ddp(views).chunk(2))
        obs.loss(loss, len(batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
