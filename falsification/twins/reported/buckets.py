import torch
import torch.distributed as dist
from torch import nn

import entrenar_py


class Bucket:
    def __init__(self, params):
        self.params = params
        self.data = torch.zeros(sum(p.numel() for p in params))

    def start(self):
        torch.cat([p.grad.flatten() for p in self.params], out=self.data)
        self.data /= dist.get_world_size()
        self.work = dist.all_reduce(self.data, async_op=True)

    def finish(self):
        self.work.wait()
        sizes = [p.numel() for p in self.params]
        for p, piece in zip(self.params, self.data.split(sizes)):
            p.grad.copy_(piece.view_as(p))


class Replica(nn.Module):
    def __init__(self, module, bucket_size=60):
        super().__init__()
        self.module, self.buckets = module, []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
        waiting = []
        for p in reversed(list(module.parameters())):
            waiting.append(p)
            if sum(q.numel() for q in waiting) >= bucket_size:
                self.buckets.append(Bucket(waiting))
                waiting = []
        if waiting:
            self.buckets.append(Bucket(waiting))

    def forward(self, x):
        return self.module(x)

    def sync(self):
        for bucket in self.buckets:
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gen = torch.Generator().manual_seed(99)
    data = torch.randn(48, 6, generator=gen)
    target = data.pow(2).sum(1, keepdim=True)
    torch.manual_seed(rank)
    layers = [nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.GELU(), nn.Linear(5, 1)]
    net = Replica(nn.Sequential(*layers))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        order = torch.randperm(48, generator=gen)
        for batch in order.split(16):
            mine = batch[rank::world]
            obs.samples(mine.tolist(), epoch=epoch)
            loss = nn.functional.smooth_l1_loss(net(data[mine]), target[mine])
            obs.loss(loss, len(mine))
            opt.zero_grad()
            loss.backward()
            net.sync()
            if any(not p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("bad gradient")
            opt.step()


main()
