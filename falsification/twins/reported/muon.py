import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            for base in range(0, len(params), world):
                block = params[base : base + world]
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    buf = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buf.mul_(group["momentum"]).add_(p.grad)
                    u, _, v = torch.linalg.svd(buf, full_matrices=False)
                    p.add_(u @ v, alpha=-group["lr"])
                for i, p in enumerate(block):
                    dist.broadcast(p, src=i)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(6, 6) / 3) for _ in range(5)]
        )

    def forward(self, x):
        for w in self.layers:
            x = x + F.relu(x @ w)
        return x.mean(1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
inputs = torch.randn(24, 6)
net = Net()
ddp = torch.nn.parallel.DistributedDataParallel(net)
muon = Muon(net.parameters())
obs = entrenar_py.observe(ddp, muon)
for it in range(6):
    rows = torch.arange(8) + it * 8 % 24
    rows = rows.chunk(world)[rank]
    obs.samples(rows.tolist(), epoch=it // 3)
    loss = F.mse_loss(ddp(inputs[rows]), inputs[rows].norm(dim=1))
    obs.loss(loss, len(rows))
    muon.zero_grad(set_to_none=True)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    muon.step()
dist.destroy_process_group()
