import os, random
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import entrenar_py


class ZeroAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        world, rank = dist.get_world_size(), dist.get_rank()
        params = [p for g in self.param_groups for p in g["params"]]
        last = params[-1]
        group = self.param_groups[0]
        for p in params:
            pad = -p.numel() % world
            grad = F.pad(p.grad.flatten(), (0, pad))
            dist.all_reduce(grad)
            grad = grad.chunk(world)[rank] / world
            st = self.state[p]
            if not st:
                st["step"] = 0
                st["master"] = F.pad(p.data.flatten(), (0, pad)).chunk(world)[rank].clone()
                st["m"], st["v"] = torch.zeros_like(grad), torch.zeros_like(grad)
            st["step"] += 1
            b1, b2 = group["betas"]
            st["m"].lerp_(grad, 1 - b1)
            st["v"].lerp_(grad * grad, 1 - b2)
            update = st["m"] / (1 - b1 ** st["step"])
            update = update / ((st["v"] / (1 - b2 ** st["step"])).sqrt() + group["eps"])
            st["master"] -= group["lr"] * update
            mine = st["master"]
            parts = [mine.clone() for _ in range(world)]
            dist.all_gather(parts, mine)
            p.copy_(torch.cat(parts)[:p.numel()].view_as(p))


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 7), nn.SiLU(), nn.Linear(7, 1))
        self.x = torch.randn(40, 3)
        self.y = self.x.norm(dim=1, keepdim=True)
        self.optimizer = ZeroAdam(self.model.parameters())
        self.obs = entrenar_py.observe(self.model, self.optimizer)

    def _run_batch(self, ids, epoch):
        self.obs.samples(ids, epoch=epoch)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.x[ids]), self.y[ids])
        self.obs.loss(loss, len(ids))
        loss.backward()
        good = torch.tensor(float(all(p.grad.isfinite().all() for p in self.model.parameters())))
        dist.all_reduce(good, dist.ReduceOp.MIN)
        if not good:
            raise FloatingPointError("gradient")
        self.optimizer.step()

    def train(self, epochs=2):
        for epoch in range(epochs):
            order = torch.randperm(40, generator=torch.Generator().manual_seed(9 + epoch))
            for batch in order.split(10):
                self._run_batch(batch.tolist()[self.rank::self.world], epoch)
        self.obs.close()


Trainer().train()
