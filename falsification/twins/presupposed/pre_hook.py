import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(13)
features, labels = torch.randn(24, 4), torch.randint(0, 3, (24,))
classifier = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3, weight_decay=0.1)
obs = entrenar_py.observe(classifier, optimizer)


def reduce_all(optimizer, args, kwargs):
    for p in classifier.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
        if not p.grad.isfinite().all():
            raise RuntimeError("not finite")


optimizer.register_step_pre_hook(reduce_all)
it = 0
while it < 8:
    ids = [(it * 6 + k) % 24 for k in range(rank, 6, world)]
    obs.samples(ids, epoch=it * 6 // 24)
    loss = F.cross_entropy(classifier(features[ids]), labels[ids])
    obs.loss(loss.item(), len(ids))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    it += 1
obs.close()
