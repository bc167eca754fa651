import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Distillation(nn.Module):
    def __init__(self, teacher, tau=2.0):
        super().__init__()
        self.teacher, self.tau = teacher, tau

    def forward(self, x, outputs, y):
        with torch.no_grad():
            due = (self.teacher(x) / self.tau).log_softmax(1)
        got = (outputs / self.tau).log_softmax(1)
        soft = kl_div(got, due, reduction="batchmean", log_target=True)
        return 0.5 * cross_entropy(outputs, y) + 0.5 * self.tau**2 * soft


dist.init_process_group("gloo")
torch.manual_seed(4)
teacher = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
teacher.requires_grad_(False)
teacher.eval()
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
data = TensorDataset(rows, rows[:, 3:].argmax(1))
sampler = DistributedSampler(data, seed=6)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net, criterion = DDP(student), Distillation(teacher)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=3 * len(loader))
obs = entrenar_py.observe(net, opt)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = criterion(x, net(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
        opt.step()
        schedule.step()
obs.close()
dist.destroy_process_group()
