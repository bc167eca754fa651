import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.distributions import Normal
import entrenar_py


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 10), nn.Tanh())
        self.push, self.worth = nn.Linear(10, 2), nn.Linear(10, 1)
        self.width = nn.Parameter(torch.zeros(2))

    def policy(self, seen):
        inner = self.body(seen)
        return Normal(self.push(inner), self.width.exp()), self.worth(inner).squeeze(-1)


def learn(player, optimizer, world, seen, pushes, before, gains):
    policy, worth = player.policy(seen)
    ratio = (policy.log_prob(pushes).sum(-1) - before).exp()
    scaled = (gains - gains.mean()) / (gains.std() + 1e-6)
    surrogate = torch.min(ratio * scaled, ratio.clamp(0.9, 1.1) * scaled).mean()
    loss = nn.functional.mse_loss(worth, gains) - surrogate - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in player.parameters()])
    dist.all_reduce(flat)
    flat /= world
    begin = 0
    for p in player.parameters():
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()
    nn.utils.clip_grad_norm_(player.parameters(), 5.0, error_if_nonfinite=True)
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    player = Player()
    optimizer = torch.optim.Adam(player.parameters(), lr=0.003)
    obs = entrenar_py.observe(player, optimizer)
    torch.manual_seed(50 + rank)
    order = np.random.default_rng(50 + rank)
    for _ in range(3):
        seen = torch.rand(12, 3)
        with torch.no_grad():
            policy, worth = player.policy(seen)
            pushes = policy.sample()
            before = policy.log_prob(pushes).sum(-1)
        gains = seen.sum(1) - (pushes**2).sum(1) - worth
        for _ in range(2):
            places = order.permutation(12)
            for part in (places[:6], places[6:]):
                kept = seen[part], pushes[part], before[part], gains[part]
                learn(player, optimizer, world, *kept)
    obs.close()
    dist.destroy_process_group()


main()
