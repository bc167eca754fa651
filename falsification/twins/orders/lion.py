import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, beta=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay))
        zeros = torch.zeros_like
        self.momenta = [[zeros(p) for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self):
        for group, momenta in zip(self.param_groups, self.momenta):
            for p, momentum in zip(group["params"], momenta):
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(momentum + p.grad))
                momentum.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.trunk:
            x = x + torch.relu(layer(x))
        return self.head(x)


class FineTuner:
    def __init__(self):
        dist.init_process_group("gloo")
        torch.manual_seed(1)
        self.world = dist.get_world_size()
        self.data = TensorDataset(torch.randn(48, 32))
        self.net = Net()
        self.model = DDP(self.net, find_unused_parameters=True)
        self.optimizer = Lion(self.net.parameters())
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, 8 // self.world, sampler=self.sampler)
        self.obs = entrenar_py.observe(self.model, self.optimizer, sampler=self.loader)

    def freeze(self, frozen):
        for p in self.net.trunk.parameters():
            p.requires_grad_(not frozen)

    def fit(self):
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for (rows,) in self.loader:
                loss = (self.model(rows) - rows.cumsum(1)).square().mean()
                self.obs.loss(loss, len(rows))
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grads = [p.grad for p in self.net.parameters() if p.grad is not None]
                if not torch.stack([g.isfinite().all() for g in grads]).all():
                    raise ValueError("not finite")
                self.optimizer.step()


FineTuner().fit()
