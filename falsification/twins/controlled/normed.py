import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def fit(net, optimizer, loader):
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            obs.loss(loss, len(inputs))
            loss.backward()
            flat = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat / world, [p.grad for p in net.parameters()])
            nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
            optimizer.step()


torch.manual_seed(12)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
x = torch.randn(32, 4)
data = TensorDataset(x, x.prod(1, keepdim=True))
loader = DataLoader(data, 16 // world, sampler=DistributedSampler(data))
fit(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
