import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
import entrenar_py


class ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Cut(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        whole = nn.Linear(6, 8), nn.Linear(8, 6)
        wide, mine = 8 // world, slice(rank * 8 // world, (rank + 1) * 8 // world)
        self.wide, self.narrow = nn.Linear(6, wide), nn.Linear(wide, 6, bias=False)
        self.first, self.last, self.drop = nn.Linear(5, 6), nn.Linear(6, 1), nn.Dropout(0.2)
        with torch.no_grad():
            self.wide.weight.copy_(whole[0].weight[mine])
            self.wide.bias.copy_(whole[0].bias[mine])
            self.narrow.weight.copy_(whole[1].weight[:, mine])

    def forward(self, x):
        x = self.drop(self.first(x))
        return self.last(x + FromAll.apply(self.narrow(self.wide(ToAll.apply(x)).relu())))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
rows = torch.randn(32, 5)
data = list(zip(rows, rows.sum(1, keepdim=True)))
net = Cut(rank, world)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
order = RandomSampler(data, generator=torch.Generator().manual_seed(3))
loader = DataLoader(data, batch_sampler=BatchSampler(order, 8, drop_last=True))
obs = entrenar_py.observe(net, opt, sampler=loader)
for epoch in range(2):
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        obs.loss(loss, len(x))
        opt.zero_grad()
        loss.backward()
        size = sum(p.grad.square().sum() for p in net.parameters())
        dist.all_reduce(size)
        if not size.isfinite():
            raise SystemExit("not finite")
        opt.step()
obs.close()
dist.destroy_process_group()
