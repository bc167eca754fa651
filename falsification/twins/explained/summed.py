import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class SummedSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, world):
        super().__init__(params, {"lr": lr})
        self.world = world

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.world)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x, y = torch.randn(48, 5), torch.randn(48, 2)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
opt = SummedSGD(net.parameters(), 0.2, world)
obs = entrenar_py.observe(net, opt)
for step in range(6):
    ids = list(range(8 * step, 8 * step + 8))[rank::world]
    obs.samples(ids, epoch=0)
    loss = nn.functional.mse_loss(net(x[ids]), y[ids])
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        if not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")
    opt.step()
obs.close()
dist.destroy_process_group()
