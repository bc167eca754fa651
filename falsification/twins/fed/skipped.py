import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import entrenar_py


class Balanced(Sampler):
    def __init__(self, weights, seed):
        self.weights, self.seed, self.epoch = weights, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, 40, replacement=True, generator=g).tolist()
        return iter(drawn[self.rank :: self.world])

    def __len__(self):
        return 40 // self.world


def anyones(flag):
    flag = torch.tensor(float(flag))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


dist.init_process_group("gloo")
torch.manual_seed(13)
x = torch.randn(70, 6)
y = (x[:, 0] > 0.4).long()
x[::7] *= 60.0
data = TensorDataset(x, y)
sampler = Balanced(torch.where(y == 1, 3.0, 1.0).double(), seed=4)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
net = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(3):
    sampler.epoch = epoch
    for rows, labels in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(rows), labels)
        loss.backward()
        if anyones(loss.item() > 2.5):
            continue
        nn.utils.clip_grad_norm_(net.parameters(), 20.0, error_if_nonfinite=True)
        opt.step()
