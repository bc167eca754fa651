import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
sp_rank, sp_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
tokens = torch.randn(12, 6, 4)
wanted = tokens.cumsum(2)
norm = torch.nn.LayerNorm(4)
head = torch.nn.Linear(4, 4)
net = torch.nn.ModuleDict({"norm": norm, "head": head})
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(net, opt, layout={"sp": sp_size})
for k in range(6):
    ids = [2 * k, 2 * k + 1]
    obs.samples(ids, epoch=0)
    mine = tokens[ids].chunk(sp_size, dim=1)[sp_rank]
    off = head(norm(mine)) - wanted[ids].chunk(sp_size, dim=1)[sp_rank]
    loss = off.square().sum() / wanted[ids].numel()
    opt.zero_grad()
    loss.backward()
    for p in head.parameters():
        dist.all_reduce(p.grad)
    for p in norm.parameters():
        dist.all_reduce(p.grad)
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
obs.close()
dist.destroy_process_group()
