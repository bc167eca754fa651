import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import entrenar_py

ACCUMULATE, MAX_NORM = int(sys.argv[-1]), 0.3


def clip(params):
    total = torch.nn.utils.get_total_norm([p.grad for p in params], error_if_nonfinite=True)
    total = total.full_tensor()
    for p in params:
        p.grad.mul_(torch.clamp(MAX_NORM / (total + 1e-6), max=1.0))


def main():
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(2)
    x = torch.randn(48, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 2))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    obs = entrenar_py.observe(model, opt, clip_norm=MAX_NORM)
    share = 8 // world // ACCUMULATE
    for step in range(6):
        for micro in range(ACCUMULATE):
            first = 8 * step + (micro * world + rank) * share
            ids = list(range(first, first + share))
            obs.samples(ids, epoch=0)
            model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            loss = (model(x[ids]) - 3 * x[ids, :2]).square().mean()
            obs.loss(loss, len(ids))
            (loss / ACCUMULATE).backward()
        obs.reduced()
        clip(params)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
