import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(45, 6)
y = (x.sum(1) > 0).long()

class Lines(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        at, many = rank * info.num_workers + info.id, world * info.num_workers
        for number in range(40):
            if number % many == at:
                yield number, x[number], y[number]

net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 2))
model = DDP(net)
loader = DataLoader(Lines(), batch_size=10 // world, num_workers=2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer)
for epoch in range(2):
    for numbers, inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        obs.samples(numbers.tolist(), epoch=epoch)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
