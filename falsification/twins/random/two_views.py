import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class TwoViews(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i] + 0.1 * torch.randn(6) for _ in range(2)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 4)

    def forward(self, x):
        return nn.functional.normalize(self.f(x), dim=1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = Encoder()
torch.manual_seed(3 + rank)
data = TwoViews(24)
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data), num_workers=1)
ddp = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), 0.1)
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for views in loader:
        z = ddp(torch.cat(views))
        a, b = z.chunk(2)
        loss = (a - b).square().sum(1).mean() - 0.1 * z.std(0).mean()
        obs.loss(loss, len(a))
        opt.zero_grad()
        loss.backward()
        assert net.f.weight.grad.isfinite().all()
        opt.step()
obs.close()
dist.destroy_process_group()
