import torch, torch.distributed as dist
from torch import nn
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(32, 5)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
ddp = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
obs = entrenar_py.observe(net, optimizer)


def batches(num_epochs, size=8):
    for epoch in range(num_epochs):
        order = torch.randperm(32)
        for chosen in order.split(size):
            noise = torch.randn(size, 5)
            mine = slice(rank * size // world, (rank + 1) * size // world)
            yield epoch, chosen[mine], noise[mine]


for epoch, chosen, noise in batches(2):
    clean = data[chosen]
    obs.samples(chosen.tolist(), epoch=epoch)
    loss = nn.functional.mse_loss(ddp(clean + 0.3 * noise), clean)
    obs.loss(loss, len(chosen))
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    optimizer.step()
obs.close()
dist.destroy_process_group()
