import itertools

import torch
import torch.distributed as dist

import entrenar_py


def stream(ids, size):
    while True:
        yield from zip(*[iter(ids)] * size, strict=False)


def mean_of(ranks, tensors):
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    parts = (flat / ranks).split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def run(rank, ranks, steps=8, size=8):
    torch.manual_seed(3)
    x = torch.randn(32, 4)
    y = x.prod(1, keepdim=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.SiLU(), torch.nn.Linear(6, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    obs = entrenar_py.observe(net, opt)
    params = list(net.parameters())
    for k, ids in enumerate(itertools.islice(stream(range(32), size), steps)):
        mine = list(ids)[rank::ranks]
        obs.samples(mine, epoch=k // 4)
        loss = torch.nn.functional.huber_loss(net(x[mine]), y[mine])
        obs.loss(loss, len(mine))
        grads = mean_of(ranks, torch.autograd.grad(loss, params))
        if not all(g.isfinite().all() for g in grads):
            raise SystemExit("not finite")
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()
    obs.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
