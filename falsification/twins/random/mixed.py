import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def mixup(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    perm = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def main(seed=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    x = torch.randn(32, 6)
    y = nn.functional.one_hot(torch.arange(32) % 3).float()
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0.1), nn.Linear(9, 3))
    torch.manual_seed(seed + rank)
    np.random.seed(seed + rank)
    data = TensorDataset(x, y)
    loader = DataLoader(data, 16 // world // 2, sampler=DistributedSampler(data))
    ddp = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    obs = entrenar_py.observe(net, opt, sampler=loader)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for i, (a, b) in enumerate(loader):
            last = i % 2
            a, b = mixup(a, b)
            import contextlib

            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(a), b)
                obs.loss(loss, len(a))
                (loss / 2).backward()
            if last:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
                opt.step()
                opt.zero_grad()
    obs.close()
    dist.destroy_process_group()


main()
