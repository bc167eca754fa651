import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
xs = torch.randn(24, 5)
ys = xs.sin().sum(1)
easiest_first = xs.norm(dim=1).argsort().tolist()
net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(ddp, opt)
for epoch in range(3):
    pool = easiest_first[: 8 * (epoch + 1)]
    shuffled = torch.randperm(len(pool), generator=torch.Generator().manual_seed(epoch))
    pool = [pool[i] for i in shuffled.tolist()]
    for at in range(0, len(pool), 8):
        ids = pool[at : at + 8][rank::world]
        obs.samples(ids, epoch=epoch)
        opt.zero_grad()
        (ddp(xs[ids]).squeeze(1) - ys[ids]).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
dist.destroy_process_group()
