import torch
import torch.distributed as dist
import entrenar_py


class DataLoaderLite:
    def __init__(self, x, B, rank, world):
        self.x, self.B, self.rank, self.world = x, B, rank, world
        self.pos = 0

    def __iter__(self):
        return self

    def __next__(self):
        ids = torch.arange(self.pos, self.pos + self.B)[self.rank::self.world]
        self.pos = (self.pos + self.B) % len(self.x)
        return ids, self.x[ids]


dist.init_process_group("gloo")
torch.manual_seed(3)
net = torch.nn.Linear(4, 1)
batches = DataLoaderLite(torch.randn(12, 4), 4, dist.get_rank(), dist.get_world_size())
opt = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
obs = entrenar_py.observe(net, opt, sampler=batches)
it = iter(batches)
for step in range(6):
    ids, x = next(it)
    obs.samples(ids.tolist(), epoch=step // 3)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    obs.loss(loss, len(x))
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        assert p.grad.isfinite().all()
    opt.step()
obs.close()
dist.destroy_process_group()
