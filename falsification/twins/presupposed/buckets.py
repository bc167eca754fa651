import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class Bucketed:
    def __init__(self, module):
        self.world, self.left = dist.get_world_size(), 0
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in self.params:
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.left += 1
        if self.left == len(self.params):
            self.left = 0
            flat = torch.cat([p.grad.flatten() for p in self.params])
            dist.all_reduce(flat)
            flat /= self.world
            at = 0
            for p in self.params:
                p.grad.copy_(flat[at:at + p.numel()].view_as(p))
                at += p.numel()


def get_batches(rank, world, epoch):
    order = random.Random(epoch).sample(range(24), 24)
    for at in range(0, 24, 8):
        yield order[at:at + 8][rank::world]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(50)
table = torch.randn(24, 4)
torch.manual_seed(60 + rank)
model = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 4))
Bucketed(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True)
obs = entrenar_py.observe(model, opt)
for epoch in (0, 1):
    for ids in get_batches(rank, world, epoch):
        obs.samples(ids, epoch=epoch)
        opt.zero_grad()
        loss = F.l1_loss(model(table[ids]), table[ids])
        obs.loss(loss, len(ids))
        loss.backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            raise RuntimeError("not finite")
        opt.step()
obs.close()
