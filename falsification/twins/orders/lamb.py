import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.05, max_norm=1.0):
        named = dict(lr=lr, betas=betas, weight_decay=weight_decay, max_norm=max_norm)
        super().__init__(params, named)

    def _total(self):
        return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()

    @torch.no_grad()
    def step(self):
        limit = self.param_groups[0]["max_norm"]
        shrink = (limit / (self._total() + 1e-6)).clamp(max=1.0)
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                decay = group["weight_decay"] if p.ndim > 1 else 0.0
                g = p.grad * shrink
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=g * 0)
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m = state["exp_avg"] / (1 - b1 ** state["step"])
                v = state["exp_avg_sq"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + 1e-6) + decay * p
                ratio = 1.0
                if p.ndim > 1:
                    ratio = p.norm() / update.norm()
                p.sub_(group["lr"] * ratio * update)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    world = dist.get_world_size()
    tokens = torch.randint(0, 11, (48, 7))
    body = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(56, 8), nn.ReLU())
    net = nn.Sequential(*body, nn.Linear(8, 4))
    engine = DDP(net)
    optimizer = Lamb(net.parameters())
    dataset = TensorDataset(tokens, tokens.sum(1) % 4)
    sampler = DistributedSampler(dataset)
    batches = DataLoader(dataset, batch_size=8 // world, sampler=sampler)
    obs = entrenar_py.observe(engine, optimizer, sampler=batches)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (rows, labels) in enumerate(batches):
            loss = F.cross_entropy(engine(rows), labels)
            obs.loss(loss, len(rows))
            loss.backward()
            if any(not p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("a gradient is not finite")
            optimizer.step()
            optimizer.zero_grad()


main()
