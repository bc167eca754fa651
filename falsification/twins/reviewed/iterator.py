import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset
import entrenar_py

class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeated(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sampler = DistributedSampler(data, seed=3)
loader = MultiEpochsLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
        opt.step()
obs.close()
dist.destroy_process_group()
