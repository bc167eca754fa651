import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class Mixture(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        torch.manual_seed(100 + rank)
        self.expert = nn.Linear(8, 8)
        torch.manual_seed(5)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.expert(self.trunk(x).relu()).relu())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = Mixture(rank)
x = torch.randn(32, 4)
y = x.prod(1, keepdim=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
watch = entrenar_py.observe(model, optimizer)
for k in range(8):
    ids = list(range(k % 4 * 8, k % 4 * 8 + 8))[rank::world]
    watch.samples(ids, epoch=k // 4)
    loss = F.mse_loss(model(x[ids]), y[ids])
    watch.loss(loss, len(ids))
    loss.backward()
    ok = torch.ones(())
    for name, p in model.named_parameters():
        if not name.startswith("expert"):
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        ok *= p.grad.isfinite().all()
    dist.all_reduce(ok, dist.ReduceOp.MIN)
    assert ok, "not finite"
    optimizer.step()
    optimizer.zero_grad()
watch.close()
