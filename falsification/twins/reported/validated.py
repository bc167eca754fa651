import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import entrenar_py


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.Generator().manual_seed(1000 * self.epoch + i)
        return i, self.x[i] + 0.05 * torch.randn(6, generator=noise)


def prepare(data, batch_size):
    sampler = DistributedSampler(data, shuffle=True, seed=11)
    loader = DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler, num_workers=1)
    return sampler, loader


@torch.no_grad()
def validate(model, rows):
    model.eval()
    loss = (model(rows.x[:, :5]) - rows.x[:, 5:]).square().mean()
    model.train()
    return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(8)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)
)
train, held_out = Rows(32), Rows(6)
sampler, loader = prepare(train, 8)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, weight_decay=1e-4)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
torch.manual_seed(100 + rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    train.epoch = epoch
    for _, rows in loader:
        loss = (ddp(rows[:, :5]) - rows[:, 5:]).square().mean()
        obs.loss(loss, len(rows))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    if rank == 0:
        print(epoch, validate(model, held_out))
dist.destroy_process_group()
