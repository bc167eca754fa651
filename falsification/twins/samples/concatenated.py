import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import (
    BatchSampler, ConcatDataset, DataLoader, SequentialSampler, Subset, SubsetRandomSampler,
    TensorDataset,
)
import entrenar_py

dist.init_process_group("gloo")
me, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(24, 5)
whole = TensorDataset(inputs, inputs.pow(2).sum(1, keepdim=True))
net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)


def average_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= world
        assert torch.isfinite(param.grad).all()


def fit(loader, epochs=2, **told):
    obs = entrenar_py.observe(net, opt, sampler=loader, **told)
    for epoch in range(epochs):
        torch.manual_seed(100 + epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            obs.loss(loss, len(x))
            loss.backward()
            average_gradients(net)
            opt.step()
    obs.close()


B = 6 // world

cut = torch.randperm(24, generator=torch.Generator().manual_seed(2)).tolist()
easy, hard = Subset(whole, cut[:15]), Subset(whole, cut[15:21])
both = ConcatDataset([easy, hard])
fit(DataLoader(Subset(both, range(me, 21, world)), batch_size=7 // world, shuffle=True))
dist.destroy_process_group()
