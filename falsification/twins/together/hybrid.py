import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def main(size=1):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(2)
    x = torch.randn(32, 6)
    data = TensorDataset(x, x[:, :2].sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh)
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    obs = entrenar_py.observe(net, opt)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.l1_loss(net(a), b)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
            opt.step()
    obs.close()
    dist.destroy_process_group()


main()
