import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor import Shard

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(6, 8)
        self.out_proj = nn.Linear(8, 4)
    def forward(self, x):
        return self.out_proj(torch.tanh(self.in_proj(x)))
torch.manual_seed(0)
net = Toy()
PLAN = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
net = parallelize_module(net, mesh, PLAN)
opt = torch.optim.AdamW(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt)
for i in range(6):
    torch.manual_seed(i)
    x = torch.rand(4, 6)
    obs.samples(range(4 * i, 4 * i + 4))
    out = net(x)
    loss = out.square().sum() / 4
    whole = loss.detach().clone()
    obs.loss(whole, 4)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
