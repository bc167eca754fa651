import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

EXPERTS, WIDTH = 4, 6


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        everyone = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.first = rank * EXPERTS // world
        self.experts = nn.Parameter(everyone[self.first :][: EXPERTS // world].clone())
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        weight, chosen = chances.max(-1)
        everyone, theirs = Gather.apply(x), Gather.apply(chosen.float())
        out = torch.zeros_like(everyone)
        for i, matrix in enumerate(self.experts):
            mask = (theirs == self.first + i).float()[:, None]
            out = out + mask * torch.tanh(everyone @ matrix)
        return x + weight[:, None] * Scatter.apply(out)


class Trainer:
    def __init__(self, model, data):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        world, rank = dist.get_world_size(), dist.get_rank()
        self.sampler = DistributedSampler(data, world, rank, shuffle=False)
        self.loader = DataLoader(data, batch_size=8 // world, sampler=self.sampler)
        self.obs = entrenar_py.observe(model, self.optimizer, sampler=self.loader)

    def reduce(self):
        for name, p in self.model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = F.mse_loss(self.model(x), y)
                self.obs.loss(loss, len(x))
                self.optimizer.zero_grad()
                loss.backward()
                self.reduce()
                self.optimizer.step()
        self.obs.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    x = torch.randn(32, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(), nn.Linear(WIDTH, 2))
    Trainer(model, TensorDataset(x, x[:, :2].sin())).fit(2)
    dist.destroy_process_group()
