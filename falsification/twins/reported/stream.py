import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py


class Shards(IterableDataset):
    def __init__(self, table, rank, world):
        self.table, self.rank, self.world, self.epoch = table, rank, world, 0

    def __iter__(self):
        order = torch.randperm(len(self.table), generator=torch.Generator().manual_seed(self.epoch))
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part, parts = self.rank * workers + worker, self.world * workers
        for i in order[part::parts].tolist():
            yield i, self.table[i]


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
table = torch.randn(48, 7)
stream = Shards(table, dist.get_rank(), world)
loader = DataLoader(stream, batch_size=8 // world, num_workers=2)
net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Softplus(), torch.nn.Linear(5, 1))
net = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt)
for epoch in range(2):
    stream.epoch = epoch
    for ids, row in loader:
        obs.samples(ids.tolist(), epoch=epoch)
        loss = (net(row[:, :6]) - row[:, 6:]).pow(2).mean()
        obs.loss(loss, len(ids))
        opt.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
dist.destroy_process_group()
