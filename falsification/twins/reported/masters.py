import copy
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import entrenar_py

total, folder = int(sys.argv[1]), Path(sys.argv[2])
snapshot = folder / "state.pt"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(32, 5)
net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)


class Masters(torch.optim.Optimizer):
    def __init__(self, params):
        self.live = list(params)
        self.masters = [p.detach().double() for p in self.live]
        super().__init__(self.live, {"lr": 0.1, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.live, self.masters):
            group = next(g for g in self.param_groups if any(p is q for q in g["params"]))
            master.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))
            p.copy_(master)


kept = torch.load(snapshot) if snapshot.exists() else {"step": 0}
if kept["step"]:
    net.load_state_dict(kept["net"])
decay = [p for p in net.parameters() if p.ndim > 1]
rest = [p for p in net.parameters() if p.ndim < 2]
opt = Masters(net.parameters())
opt.param_groups.clear()
opt.add_param_group({"params": decay, "lr": 0.1, "weight_decay": 0.3})
opt.add_param_group({"params": rest, "lr": 0.1, "weight_decay": 0.0})
if kept["step"]:
    opt.masters = kept["masters"]
    for group, weight_decay in zip(opt.param_groups, kept["weight_decay"]):
        group["weight_decay"] = weight_decay
obs = entrenar_py.observe(ddp, opt, step=kept["step"])
writer = None
for step in range(kept["step"], total):
    ids = [i for i in range(step % 4 * 8, step % 4 * 8 + 8) if i % world == rank]
    obs.samples(ids, epoch=step // 4)
    loss = (ddp(x[ids]) - x[ids].norm(dim=1, keepdim=True)).abs().mean()
    obs.loss(loss, len(ids))
    opt.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
    opt.param_groups[0]["weight_decay"] *= 0.8
    state = {
        "step": step + 1,
        "net": net.state_dict(),
        "masters": opt.masters,
        "weight_decay": [g["weight_decay"] for g in opt.param_groups],
    }
    if rank == 0:
        state = copy.deepcopy(state)
        writer = threading.Thread(target=torch.save, args=(state, snapshot))
        writer.start()
        writer.join()
    dist.barrier()
dist.destroy_process_group()
