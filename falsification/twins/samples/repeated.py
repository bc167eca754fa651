import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset
import entrenar_py


class RepeatAugSampler(Sampler):
    """Draws each sample several times, on different ranks, for different augmentations."""

    def __init__(self, dataset, repetitions):
        self.size, self.repetitions, self.epoch = len(dataset), repetitions, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        repeated = order.repeat_interleave(self.repetitions)[self.rank :: self.world]
        return iter(repeated[: len(self)].tolist())

    def __len__(self):
        return self.size // self.world

    def set_epoch(self, epoch):
        self.epoch = epoch


dist.init_process_group("gloo")
torch.manual_seed(17)
pictures = torch.randn(48, 6)
data = TensorDataset(pictures, pictures.norm(dim=1, keepdim=True))
sampler = RepeatAugSampler(data, 3)
loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler)
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1)))
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
entrenar_py.observe(net, adam, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        adam.zero_grad()
        nn.functional.l1_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 20.0, error_if_nonfinite=True)
        adam.step()
dist.destroy_process_group()
