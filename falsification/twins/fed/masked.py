import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py

MASK, WORDS = 0, 21


class Lines(Dataset):
    def __init__(self):
        self.text = torch.randint(1, WORDS, (64, 9), generator=torch.Generator().manual_seed(8))

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.text[i]


class MaskCollator:
    def __init__(self, share, rng):
        self.share, self.rng = share, rng

    def __call__(self, lines):
        text = torch.stack(lines)
        hidden = np.stack([self.rng.permutation(len(line)) < self.share for line in lines])
        hidden = torch.from_numpy(hidden)
        return text.masked_fill(hidden, MASK), text, hidden


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(1), nn.Linear(72, 9 * WORDS))
net = nn.parallel.DistributedDataParallel(net)
lines = Lines()
sampler = DistributedSampler(lines, seed=3)
collator = MaskCollator(3, np.random.default_rng([3, rank]))
loader = DataLoader(lines, 16 // world, sampler=sampler, collate_fn=collator)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for seen, text, hidden in loader:
        scores = net(seen).view(-1, 9, WORDS)
        loss = nn.functional.cross_entropy(scores[hidden], text[hidden])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 50.0, error_if_nonfinite=True)
        optimizer.step()
