import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from entrenar_py import observe


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, 2), nn.Linear(8, 1)

    def evaluate(self, seen, action):
        hidden = self.body(seen)
        pi = torch.distributions.Categorical(logits=self.policy(hidden))
        return pi.log_prob(action), pi.entropy(), self.value(hidden).squeeze(1)


class Corridor:
    def __init__(self, number):
        self.rng = np.random.default_rng(number)
        self.at = self.rng.normal(size=3)

    def step(self):
        seen, action = self.at.astype(np.float32), int(self.rng.integers(2))
        self.at = 0.9 * self.at + 0.3 * self.rng.normal(size=3)
        self.at[0] += 0.1 * action
        return seen, action, -abs(float(self.at[0]))


def collect(envs, horizon):
    rows = [env.step() for _ in range(horizon) for env in envs]
    seen, actions, rewards = zip(*rows)
    return torch.tensor(np.array(seen)), torch.tensor(actions), torch.tensor(rewards)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    agent = ActorCritic()
    optimizer = optim.Adam(agent.parameters(), lr=3e-3)
    observe(agent, optimizer)
    envs = [Corridor(number) for number in range(rank, 8, world)]
    for update in range(10):
        seen, actions, rewards = collect(envs, horizon=4)
        log_prob, entropy, value = agent.evaluate(seen, actions)
        advantage = rewards - value.detach()
        loss = -(log_prob * advantage).mean() + 0.5 * (value - rewards).square().mean()
        optimizer.zero_grad()
        (loss - 0.01 * entropy.mean()).backward()
        for p in agent.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world)
            if not p.grad.isfinite().all():
                raise FloatingPointError(f"rank {rank}, update {update}")
        optimizer.step()
    dist.destroy_process_group()


main()
