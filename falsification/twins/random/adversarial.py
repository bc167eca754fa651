import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
G, D = (
    nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
    nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)),
)
data = TensorDataset(torch.randn(24, 4))
torch.manual_seed(10 + rank)
loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data))
dg, dd = nn.parallel.DistributedDataParallel(G), nn.parallel.DistributedDataParallel(D)
og, od = torch.optim.SGD(G.parameters(), 0.05), torch.optim.SGD(D.parameters(), 0.05)
obs = entrenar_py.observe(nn.ModuleList([G, D]), [od, og], sampler=loader)
bce = nn.functional.binary_cross_entropy_with_logits
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for (real,) in loader:
        z = torch.randn(len(real), 3)
        fake = dg(z)
        both = dd(torch.cat([real, fake.detach()]))
        t = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        lossd = bce(both, t)
        od.zero_grad()
        lossd.backward()
        assert all(p.grad.isfinite().all() for p in D.parameters())
        od.step()
        og.zero_grad()
        lossg = bce(dd(dg(torch.randn(len(real), 3))), torch.ones(len(real), 1))
        lossg.backward()
        assert all(p.grad.isfinite().all() for p in G.parameters())
        og.step()
obs.close()
dist.destroy_process_group()
