import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)
forger = DDP(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)))
expert = DDP(nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1)))
of_forger = torch.optim.Adam(forger.parameters(), lr=0.003, betas=(0.5, 0.999))
of_expert = torch.optim.Adam(expert.parameters(), lr=0.003, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
obs = entrenar_py.observe(nn.ModuleList([forger, expert]), [of_expert, of_forger])
torch.manual_seed(60 + rank)
ones, zeros = torch.ones(7), torch.zeros(7)
for step in range(6):
    angle = torch.rand(7) * 6.28
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    forged = forger(torch.randn(7, 4))
    of_expert.zero_grad()
    loss = criterion(expert(real).flatten(), ones)
    loss = loss + criterion(expert(forged.detach()).flatten(), zeros)
    loss.backward()
    nn.utils.clip_grad_norm_(expert.parameters(), 9.0, error_if_nonfinite=True)
    of_expert.step()
    of_forger.zero_grad()
    criterion(expert(forged).flatten(), ones).backward()
    nn.utils.clip_grad_norm_(forger.parameters(), 9.0, error_if_nonfinite=True)
    of_forger.step()
obs.close()
dist.destroy_process_group()
