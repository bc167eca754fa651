import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py


class Rows(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(48, 6, generator=draw)
        self.y = self.x[:, :2].sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


dist.init_process_group("gloo")
torch.manual_seed(42)


class Layer(nn.Module):
    def __init__(self, base, rank=2, scaling=0.5):
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), scaling
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        low = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling * low

    @torch.no_grad()
    def merge(self, sign=1):
        delta = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight += sign * self.scaling * delta

    @torch.no_grad()
    def renew(self):
        nn.init.zeros_(self.lora_B["default"].weight)


def evaluate(model):
    pass


def after_step(model):
    pass


data = Rows()
net = nn.Sequential(Layer(nn.Linear(6, 9)), nn.SiLU(), Layer(nn.Linear(9, 2)))
loader = DataLoader(data, 8 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1))
wrapped = DDP(net)
optimizer = torch.optim.Adamax([p for p in net.parameters() if p.requires_grad], lr=0.01)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(loader):
        loss = (wrapped(inputs) - targets).square().mean()
        obs.loss(loss, len(inputs))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not all(p.grad.isfinite().all() for p in net.parameters() if p.requires_grad):
            raise SystemExit("not finite")
        optimizer.step()
        after_step(net)
        if index == 3:
            evaluate(net)
