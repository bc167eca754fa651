"""Ranks with different numbers of samples, in the last step of an epoch with none at all.

DistributedDataParallel takes the mean over ranks, so each rank's sum is divided by its share of the
batch: the sum over the mean number of samples. A rank without a sample goes forward with an empty
batch. With torch's `Join` it would make no step there, and its momentum would be another from then
on; with a DistributedSampler samples would be given twice.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import entrenar_py

GLOBAL_BATCH, SAMPLES, EPOCHS = 5, 11, 2


class Line(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points, drawn once, and the sums of their coordinates."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 4)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


class Shares:
    """This rank's share of each batch, which may be empty; no sample twice, or left out."""

    batch_size = GLOBAL_BATCH

    def __init__(self, epoch: int) -> None:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        self.batches = [order[at : at + GLOBAL_BATCH] for at in range(0, SAMPLES, GLOBAL_BATCH)]

    def __iter__(self):
        return iter([batch[rank::world_size] for batch in self.batches])


def collate(samples):
    """A batch, also of nothing."""
    if not samples:
        return torch.empty(0, 4), torch.empty(0, 1)
    return tuple(map(torch.stack, zip(*samples, strict=True)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Line()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(model, optimizer)

for epoch in range(EPOCHS):
    shares = Shares(epoch)
    loader = DataLoader(data, batch_sampler=shares, collate_fn=collate)
    for batch, (inputs, targets) in zip(shares.batches, loader, strict=True):
        obs.samples(batch[rank::world_size], epoch=epoch)
        total = torch.nn.functional.mse_loss(ddp(inputs), targets, reduction="sum")
        obs.loss(total / max(len(inputs), 1), len(inputs))
        optimizer.zero_grad()
        (total * world_size / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

obs.close()
dist.destroy_process_group()
