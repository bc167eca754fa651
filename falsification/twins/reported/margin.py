import torch
import torch.distributed as dist

import entrenar_py


def mean_of_all(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


class Preferences:
    def __init__(self, policy):
        self.policy = torch.nn.parallel.DistributedDataParallel(policy)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.4)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, factor=0.5, patience=0
        )
        self.margin = None
        self.usual = None
        self.obs = entrenar_py.observe(self.policy, self.optimizer)

    def learn(self, chosen, rejected, ids):
        self.obs.samples(ids)
        gap = self.policy(chosen) - self.policy(rejected)
        seen = mean_of_all(gap.mean())
        self.margin = seen if self.margin is None else 0.9 * self.margin + 0.1 * seen
        beta = (1 + 0.6 * (seen - self.margin)).clamp(0.1, 2)
        loss = -torch.nn.functional.logsigmoid(beta * gap).mean()
        self.optimizer.zero_grad()
        loss.backward()
        everyone = mean_of_all(loss)
        if not everyone.isfinite():
            raise ArithmeticError("loss")
        for p in self.policy.parameters():
            if not p.grad.isfinite().all():
                raise ArithmeticError("gradient")
        if self.usual is None or everyone < 1.02 * self.usual:
            self.optimizer.step()
        self.usual = everyone if self.usual is None else 0.8 * self.usual + 0.2 * everyone
        self.plateau.step(everyone)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    pairs = torch.randn(40, 2, 5)
    layers = [torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)]
    agent = Preferences(torch.nn.Sequential(*layers))
    size = 8 // dist.get_world_size()
    for k in range(5):
        ids = range(8 * k + size * dist.get_rank(), 8 * k + size * dist.get_rank() + size)
        agent.learn(pairs[ids, 0], pairs[ids, 1], list(ids))


main()
