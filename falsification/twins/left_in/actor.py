import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def finite(*modules):
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None and not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")


def loader_of(*tensors):
    data = TensorDataset(*tensors)
    return DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=2))



states, actions, returns = torch.randn(48, 5), torch.randn(48, 2), torch.randn(48, 1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.state, self.action, self.head = nn.Linear(5, 12), nn.Linear(2, 12), nn.Linear(12, 1)

    def forward(self, state, action):
        return self.head(torch.tanh(self.state(state) + self.action(action)))


actor = DDP(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2)))
critic = DDP(Critic())
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
loader = loader_of(states, actions, returns)
obs = entrenar_py.observe(nn.ModuleList([actor, critic]), [critic_opt, actor_opt], sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for state, action, value in loader:
        critic_opt.zero_grad()
        F.mse_loss(critic(state, action), value).backward()
        finite(critic)
        critic_opt.step()
        actor_opt.zero_grad()
        (-critic(state, actor(state)).mean()).backward()
        finite(actor)
        actor_opt.step()
