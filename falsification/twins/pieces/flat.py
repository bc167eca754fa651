import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        world = dist.get_world_size()
        whole = torch.empty(world * shard.numel())
        dist.all_gather_into_tensor(whole, shard)
        return whole

    @staticmethod
    def backward(ctx, grad):
        world, rank = dist.get_world_size(), dist.get_rank()
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.div(world).chunk(world)[rank]


class ShardedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        layer, world = nn.Linear(inputs, outputs), dist.get_world_size()
        self.shape = layer.weight.shape
        flat = torch.cat([layer.weight.detach().reshape(-1), layer.bias.detach()])
        flat = F.pad(flat, (0, -len(flat) % world))
        self.flat = nn.Parameter(flat.chunk(world)[dist.get_rank()].clone())

    def forward(self, x):
        outputs, inputs = self.shape
        flat = Unshard.apply(self.flat)
        weight = flat[: outputs * inputs].view(outputs, inputs)
        return F.linear(x, weight, flat[outputs * inputs :][:outputs])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(53)
    x = torch.randn(32, 4)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    net = nn.Sequential(ShardedLinear(4, 6), nn.SiLU(), ShardedLinear(6, 1))
    sampler = DistributedSampler(data, world, rank, seed=3)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = F.mse_loss(net(inputs), wanted)
            obs.loss(loss, len(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    obs.close()


main()
