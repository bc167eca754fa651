import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def __init__(self, optimizer, net, inputs, targets):
        super().__init__(optimizer, factor=0.5, patience=0)
        self.net, self.inputs, self.targets = net, inputs, targets

    @torch.no_grad()
    def look(self):
        for buffer in self.net.buffers():
            dist.broadcast(buffer, 0)
        score = F.mse_loss(self.net.eval()(self.inputs), self.targets)
        self.net.train()
        self.step(score.item())


torch.manual_seed(18)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.5), nn.ReLU(), nn.Linear(6, 1))
x, kept = torch.randn(32, 4), torch.randn(12, 4)
sampler = DistributedSampler(TensorDataset(x, x.prod(1, keepdim=True)))
loader = DataLoader(sampler.dataset, 8 // world, sampler=sampler)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = Plateau(optimizer, net, kept, kept.prod(1, keepdim=True))
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
        plateau.look()
