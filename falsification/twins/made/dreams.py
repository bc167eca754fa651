import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)

things = torch.randn(48, 5).cumsum(1)
shares = DistributedSampler(things, seed=3)
loader = DataLoader(things, batch_size=12 // world, sampler=shares)
dreamer = DDP(nn.Sequential(nn.Linear(3, 12), nn.SiLU(), nn.Linear(12, 5)))
critic = DDP(nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 1)))
of_dreamer = torch.optim.RMSprop(dreamer.parameters(), lr=1e-3)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
obs = entrenar_py.observe(nn.ModuleDict({"d": dreamer, "c": critic}), [of_critic, of_dreamer])
torch.manual_seed(70 + rank)
for epoch in range(2):
    shares.set_epoch(epoch)
    for real in loader:
        of_critic.zero_grad()
        (-critic(real).mean()).backward()
        dreams = dreamer(torch.rand(len(real), 3))
        loss = critic(dreams.detach()).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1e3, error_if_nonfinite=True)
        of_critic.step()
        of_dreamer.zero_grad()
        (-critic(dreams).mean()).backward()
        nn.utils.clip_grad_norm_(dreamer.parameters(), 1e3, error_if_nonfinite=True)
        of_dreamer.step()
dist.destroy_process_group()
