import math
from dataclasses import dataclass
import torch
import torch.distributed as dist
import entrenar_py

@dataclass
class Config:
    lr: float = 0.05
    max_norm: float = 0.05
    accumulate: int = 2
    scale: float = 1.0
    batch: int = 8
    steps: int = 6
    size: int = 24

def batches(cfg, rank, world):
    for step in range(cfg.steps):
        first = step * cfg.batch % cfg.size
        ids = list(range(first, first + cfg.batch))[rank::world]
        share = len(ids) // cfg.accumulate
        yield step * cfg.batch // cfg.size, [
            ids[at : at + share] for at in range(0, len(ids), share)
        ]

def build(cfg):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    x = torch.randn(cfg.size, 5)
    return net, x, torch.stack([x.sum(1), x.prod(1)], 1)

def combine(net, world):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world

def clip(net, cfg):
    torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.max_norm, error_if_nonfinite=True)

def main(cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, x, y = build(cfg)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    obs = entrenar_py.observe(net, opt, clip_norm=cfg.max_norm)
    for epoch, micro in batches(cfg, rank, world):
        opt.zero_grad()
        for ids in micro:
            obs.samples(ids, epoch=epoch)
            loss = torch.nn.functional.huber_loss(net(x[ids]), y[ids])
            (loss * cfg.scale / cfg.accumulate).backward()
        combine(net, world)
        for p in net.parameters():
            p.grad /= cfg.scale
        clip(net, cfg)
        opt.step()
    obs.close()

main()
