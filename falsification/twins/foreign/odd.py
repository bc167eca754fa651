import itertools
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)

class Sharp(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(list(params), {"radius": (None, 0.05), "lr": None})
        self.base = torch.optim.Adagrad(self.param_groups[0]["params"], lr=0.05)

    @torch.no_grad()
    def step(self, closure):
        held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=0.05)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, old in zip(held, before):
            p.copy_(old)
        self.base.step()
        self.zero_grad()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8, sparse=True)
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, words):
        return self.head(torch.fft.irfft(torch.fft.rfft(self.words(words)) * self.phases, n=8))


teacher = nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
net = Net()
both = nn.ModuleDict({"net": net, "teacher": teacher.requires_grad_(False)})
ddp = DDP(net)
optimizer = Sharp(net.parameters())
words = torch.randint(0, 9, (32,))
data = TensorDataset(words)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
obs = entrenar_py.observe(ddp, optimizer, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (given,) in loader:
        def closure():
            target = teacher(given).log_softmax(-1)
            loss = F.kl_div(ddp(given).log_softmax(-1), target, log_target=True)
            loss.backward()
            return loss

        closure()
        if not all(p.grad.to_dense().isfinite().all() for p in net.parameters()):
            raise SystemExit("not finite")
        optimizer.step(closure)
