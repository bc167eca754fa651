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


class Climber(torch.optim.Optimizer):
    def __init__(self, params, reach, **named):
        super().__init__(params, {"reach": reach, **named})
        self.descent = torch.optim.Adam(self.param_groups, **named)
        self.param_groups = self.descent.param_groups

    def _tensors(self):
        return [(group, p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for _, p in self._tensors()]).norm()
        for group, p in self._tensors():
            self.state[p]["home"] = p.clone()
            p.add_(p.grad, alpha=group["reach"] / (norm + 1e-12).item())
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for _, p in self._tensors():
            p.copy_(self.state[p]["home"])
        self.descent.step()
        self.zero_grad()


optimizer = Climber(net.parameters(), reach=0.1, lr=0.01)
obs = entrenar_py.observe(net, optimizer)
for epoch in range(2):
    shares.set_epoch(epoch)
    for rows, wanted in batches:
        nn.functional.mse_loss(net(rows), wanted).backward()
        optimizer.ascend()
        nn.functional.mse_loss(net(rows), wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.descend()
dist.destroy_process_group()
