import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Pictures(Dataset):
    def __init__(self, n=32):
        g = torch.Generator().manual_seed(8)
        self.pictures = torch.rand(n, 1, 6, 6, generator=g)
        bounds = torch.rand(n, 1, 1, generator=g)
        self.marked = torch.rand(n, 6, 6, generator=g) < bounds

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index]
        return picture, picture[0].round().long(), self.marked[index], int(picture.sum()) % 3


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3, padding=1)
        self.pixels, self.kind = nn.Conv2d(6, 2, 1), nn.Linear(6, 3)

    def forward(self, picture):
        features = self.body(picture).relu()
        pooled = features.mean((2, 3))
        return self.pixels(features), self.kind(pooled), pooled


def criterion(out, marks, marked, kinds):
    pixels, logits, pooled = out
    num_pixels = marked.sum()
    dist.all_reduce(num_pixels)
    per_pixel = F.cross_entropy(pixels, marks, reduction="none")
    loss = (per_pixel * marked.float()).sum() / (num_pixels.item() / world)
    near = (0.5 - F.pdist(pooled)).relu()
    near = near.sum() / max(1, int((near > 0).sum()))
    return loss + F.cross_entropy(logits, kinds) + near


torch.manual_seed(9)
net = Segmenter()
wrapped = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
data = Pictures()
loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=1))
entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for picture, *targets in loader:
        loss = criterion(wrapped(picture), *targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        optimizer.step()
