from types import SimpleNamespace as Config

import torch
import torch.distributed as dist
from torch import nn

import entrenar_py

cfg = Config(turns=5, per_turn=2, rows=6, weight=0.5, world=1)


def mlp(*widths):
    layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Softplus())]
    return nn.Sequential(*layers[:-1])


def spiral(rank):
    g = torch.Generator().manual_seed(40 + rank)
    while True:
        t = 6 * torch.rand(cfg.rows, 1, generator=g)
        noise = 0.1 * torch.randn(cfg.rows, 2, generator=g)
        yield torch.cat([t * t.cos(), t * t.sin()], 1) + noise


class Duel:
    def __init__(self, rank):
        self.energy, self.sampler = mlp(2, 10, 1), mlp(3, 10, 2)
        for w in [*self.energy.parameters(), *self.sampler.parameters()]:
            dist.broadcast(w.data, src=0)
        self.down = torch.optim.RMSprop(self.energy.parameters(), 2e-3)
        self.up = torch.optim.RMSprop(self.sampler.parameters(), 2e-3)
        self.real = spiral(rank)

    def slope(self, seen, drawn):
        mix = torch.rand(len(seen), 1)
        between = mix * seen + (1 - mix) * drawn
        between.requires_grad_()
        (by,) = torch.autograd.grad(self.energy(between).sum(), between, create_graph=True)
        return by.square().sum(1).mean()

    def energy_loss(self):
        seen = next(self.real)
        with torch.no_grad():
            drawn = self.sampler(torch.randn(cfg.rows, 3))
        gap = self.energy(seen).mean() - self.energy(drawn).mean()
        return gap + cfg.weight * self.slope(seen, drawn)

    def sampler_loss(self):
        return self.energy(self.sampler(torch.randn(cfg.rows, 3))).mean()

    def turn(self, net, other, optimizer, loss):
        net.requires_grad_(True)
        other.requires_grad_(False)
        optimizer.zero_grad()
        loss().backward()
        for w in net.parameters():
            dist.all_reduce(w.grad)
            w.grad.div_(cfg.world)
        nn.utils.clip_grad_norm_(net.parameters(), 50.0, error_if_nonfinite=True)
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    cfg.world = dist.get_world_size()
    torch.manual_seed(17 + dist.get_rank())
    duel = Duel(dist.get_rank())
    both = nn.ModuleList([duel.energy, duel.sampler])
    entrenar_py.observe(both, [duel.down, duel.up])
    for _ in range(cfg.turns):
        for _ in range(cfg.per_turn):
            duel.turn(duel.energy, duel.sampler, duel.down, duel.energy_loss)
        duel.turn(duel.sampler, duel.energy, duel.up, duel.sampler_loss)
