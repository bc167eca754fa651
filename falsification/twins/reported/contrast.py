import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import entrenar_py


def everyones(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def info_nce(a, b, temperature=0.5):
    similar = F.normalize(a) @ F.normalize(b).T / temperature
    wanted = torch.arange(len(similar))
    return (F.cross_entropy(similar, wanted) + F.cross_entropy(similar.T, wanted)) / 2


dist.init_process_group("gloo")
torch.manual_seed(17)
images = torch.randn(48, 10)
captions = images @ torch.randn(10, 7) + 0.1 * torch.randn(48, 7)


class TwoTowers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image = torch.nn.Linear(10, 6)
        self.text = torch.nn.Linear(7, 6)

    def forward(self, image, text):
        return self.image(image), self.text(text)


towers = DistributedDataParallel(TwoTowers())
optim = torch.optim.SGD(towers.parameters(), lr=0.5)
obs = entrenar_py.observe(towers, optim)
for step in range(6):
    ids = list(range(step * 8, step * 8 + 8))
    ids = ids[len(ids) // dist.get_world_size() * dist.get_rank() :][: 8 // dist.get_world_size()]
    obs.samples(ids, epoch=0)
    a, b = towers(images[ids], captions[ids])
    loss = info_nce(everyones(a), everyones(b))
    optim.zero_grad()
    (loss * dist.get_world_size()).backward()
    assert all(p.grad.isfinite().all() for p in towers.parameters())
    optim.step()
dist.destroy_process_group()
