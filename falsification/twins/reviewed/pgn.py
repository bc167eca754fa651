import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
torch.manual_seed(3)
world = dist.get_world_size()
data = TensorDataset(torch.randn(192, 10), torch.randint(0, 4, (192,)))
net = DDP(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // world, sampler=sampler)
alpha, radius = 0.4, 0.05
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        ((1 - alpha) * cross_entropy(net(x), y)).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12
            kept = [p.clone() for p in net.parameters()]
            for p in net.parameters():
                p.add_(p.grad, alpha=(radius / norm).item())
        (alpha * cross_entropy(net(x), y)).backward()
        with torch.no_grad():
            for p, k in zip(net.parameters(), kept):
                p.copy_(k)
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
