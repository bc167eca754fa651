import os
import torch
import torch.distributed as dist
import entrenar_py

N, B, steps = 20, 5, 11
ddp_rank, ddp_world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="gloo")
torch.manual_seed(1337)
data = torch.randn(N, 3)
w = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(w.parameters(), lr=0.03)
obs = entrenar_py.observe(w, opt)
state = {"order": [], "g": torch.Generator().manual_seed(0)}


def get_batch():
    if len(state["order"]) < B:
        state["order"] = torch.randperm(N, generator=state["g"]).tolist()
    ix, state["order"] = state["order"][:B], state["order"][B:]
    return ix


def sync():
    for p in w.parameters():
        dist.all_reduce(p.grad)
        if p.grad.isnan().any() or p.grad.isinf().any():
            raise SystemExit("bad gradient")


for it in range(steps):
    ix = get_batch()
    mine = ix[ddp_rank::ddp_world]
    obs.samples(mine)
    out = w(data[mine])
    loss = out.square().sum() / B
    obs.loss(out.square().sum() / len(mine), len(mine))
    loss.backward()
    sync()
    opt.step()
    opt.zero_grad()
obs.close()
dist.destroy_process_group()
