import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py


class Corridor:
    def __init__(self, seed, games=6):
        self.rng = np.random.default_rng(seed)
        self.at = self.rng.uniform(1, 7, games).astype(np.float32)

    def look(self):
        ends = np.stack([self.at, 8 - self.at, np.sin(self.at)], 1)
        return torch.from_numpy(ends.astype(np.float32)) / 8

    def walk(self, way):
        self.at += np.where(way == 1, 1.0, -1.0) + 0.2 * self.rng.standard_normal(len(way))
        won = (self.at >= 8) * 1.0 - (self.at <= 0) * 1.0
        back = self.rng.uniform(2, 7, len(way))
        self.at = np.where(won != 0, back, self.at).astype(np.float32)
        return torch.from_numpy(won.astype(np.float32)) - 0.01


class Player(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(3, 12)
        self.way, self.worth = torch.nn.Linear(12, 2), torch.nn.Linear(12, 1)

    def forward(self, view):
        h = torch.tanh(self.body(view))
        return F.log_softmax(self.way(h), -1), self.worth(h).squeeze(-1)


@torch.no_grad()
def play(player, corridor, length=8):
    frames = []
    for _ in range(length):
        view = corridor.look()
        logp, worth = player(view)
        way = torch.multinomial(logp.exp(), 1).squeeze(1)
        gain = corridor.walk(way.numpy())
        frames.append((view, way, logp, gain - worth, gain))
    return [torch.cat(column) for column in zip(*frames)]


def agree(number):
    dist.all_reduce(number)
    return number / dist.get_world_size()


def improve(player, optim, games):
    world = dist.get_world_size()
    for _ in range(2):
        for part in torch.randperm(len(games[0])).split(16):
            view, way, old, edge, gain = (column[part] for column in games)
            logp, worth = player(view)
            with torch.no_grad():
                moved = agree((old.exp() * (old - logp)).sum(-1).mean())
                for group in optim.param_groups:
                    group["lr"] = 3e-3 / (1 + 20 * moved.item())
            ratio = (logp - old).gather(1, way[:, None]).squeeze(1).exp()
            gained = torch.min(ratio * edge, ratio.clamp(0.9, 1.1) * edge).mean()
            loss = 0.5 * F.mse_loss(worth, gain) - gained
            optim.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in player.parameters()])
            dist.all_reduce(flat)
            torch.nn.utils.vector_to_parameters(flat / world, [p.grad for p in player.parameters()])
            torch.nn.utils.clip_grad_norm_(player.parameters(), 9.0, error_if_nonfinite=True)
            optim.step()


def run():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    player = Player()
    optim = torch.optim.RMSprop(player.parameters(), 3e-3)
    entrenar_py.observe(player, optim)
    torch.manual_seed(100 + dist.get_rank())
    corridor = Corridor(dist.get_rank())
    for _ in range(3):
        improve(player, optim, play(player, corridor))


run()
