import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

def averaged(network, world):
    for p in network.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(network.parameters(), 0.5, error_if_nonfinite=True)

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    draw = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    judge = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    real, noise = torch.randn(24, 2), torch.randn(24, 2)
    drawing = torch.optim.Adam(draw.parameters(), lr=1e-2)
    judging = torch.optim.Adam(judge.parameters(), lr=1e-2)
    both = nn.ModuleDict({"draw": draw, "judge": judge})
    obs = entrenar_py.observe(both, [judging, drawing], frozen=())
    for step in range(6):
        ids = [(step * 8 + i) % 24 for i in range(8)][rank::world]
        obs.samples(ids, epoch=step // 3)
        judging.zero_grad()
        drawn = draw(noise[ids])
        (judge(real[ids]) - 1).square().mean().add(judge(drawn.detach()).square().mean()).backward()
        averaged(judge, world)
        judging.step()
        drawing.zero_grad()
        (judge(drawn) - 1).square().mean().backward()
        averaged(draw, world)
        drawing.step()
    obs.close()

main()
