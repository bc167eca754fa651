import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
import entrenar_py


class Set(Dataset):
    def __init__(self):
        self.x = torch.arange(48.0).reshape(24, 2) / 48
        self.rng = np.random.RandomState(0)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, self.x[i] + 0.05 * torch.randn(2), self.x[i].sum()


def cycle(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for b in loader:
            yield epoch, b
        epoch += 1


def run(rank, world):
    torch.manual_seed(1)
    net = nn.Linear(2, 1)
    torch.manual_seed(100 + rank)
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = Set()
    loader = DataLoader(
        data,
        8 // world,
        sampler=DistributedSampler(data),
        num_workers=2,
        persistent_workers=True,
    )
    obs = entrenar_py.observe(net, opt)
    it = cycle(loader)
    for step in range(6):
        epoch, (ids, x, y) = next(it)
        obs.samples(ids, epoch=epoch)
        loss = ((ddp(x)[:, 0] - y) ** 2).mean()
        obs.loss(loss, len(ids))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0, error_if_nonfinite=True)
        opt.step()
    obs.close()


dist.init_process_group("gloo")
run(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
