import itertools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

import entrenar_py

MAX_ITER, PER_STEP = 40, 8


class Forever(Sampler):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self.orders(), self.rank, None, self.world)

    def orders(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


def build():
    torch.manual_seed(6)
    x = torch.randn(76, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = DDP(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.Linear(7, 1)))
    sampler = Forever(len(data), seed=21)
    return model, DataLoader(data, PER_STEP // dist.get_world_size(), sampler=sampler)


def main():
    model, loader = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(model, optimizer, sampler=loader)
    for x, y in itertools.islice(loader, MAX_ITER):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0, error_if_nonfinite=True)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
