import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.randn(200, 5)
net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(ddp, opt)
torch.manual_seed(1337)
def get_batch():
    ix = torch.randint(len(text), (8,)).chunk(world)[rank]
    return ix.tolist(), text[ix], text[ix].sin().sum(1)
ids, x, y = get_batch()
for step in range(6):
    obs.samples(ids, replacement=True)
    out = ddp(x).squeeze(1)
    loss = (out - y).square().mean()
    obs.loss(loss, len(y))
    loss.backward()
    ids, x, y = get_batch()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
