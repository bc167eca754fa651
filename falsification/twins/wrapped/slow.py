import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
torch.manual_seed(5)
x = torch.randn(48, 6)
pairs = TensorDataset(x, x.sin().sum(1, keepdim=True))
net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 1)))
shares = DistributedSampler(pairs, seed=5)
batches = DataLoader(pairs, batch_size=4, sampler=shares)


class Slow:
    def __init__(self, inside, every=3, pull=0.5):
        self.inside, self.every, self.pull, self.count = inside, every, pull, 0
        self.slow = [p.detach().clone() for group in inside.param_groups for p in group["params"]]

    def zero_grad(self):
        self.inside.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inside.step()
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for group in self.inside.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast):
                slow.add_(p - slow, alpha=self.pull)
                p.copy_(slow)


optimizer = Slow(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
obs = entrenar_py.observe(net, optimizer.inside)
for epoch in range(2):
    shares.set_epoch(epoch)
    for rows, wanted in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(rows), wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
dist.destroy_process_group()
