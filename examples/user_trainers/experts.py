"""Two experts, one on each rank of a pair, by hand; data parallelism between the pairs.

entrenar-check --contract distributed-training-v1.yaml -- \
    torchrun --standalone --nproc_per_node={world_size} examples/user_trainers/experts.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH = 8
dist.init_process_group("gloo")
world_size = dist.get_world_size()
num_pairs, size = (world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1)
mesh = init_device_mesh("cpu", (num_pairs, size), mesh_dim_names=("dp", "ep"))
pair, place = mesh.get_local_rank("dp"), mesh.get_local_rank("ep")


def summed(one: Tensor) -> Tensor:
    """Over the experts of the pair."""
    dist.all_reduce(one := one.detach().clone(), group=mesh.get_group("ep"))
    return one


class Experts(nn.Module):
    """The experts of the two that this rank has; each sample goes to one of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.router = nn.Linear(4, 8), nn.Linear(8, 2)
        both = [(str(number), nn.Linear(8, 1)) for number in range(2)]  # drawn alike on all ranks
        self.experts = nn.ModuleDict(dict(both[place::size]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        gates, part = self.router(hidden).softmax(-1), torch.zeros(len(x), 1)
        for shared in (hidden := hidden.view_as(hidden), gates := gates.view_as(gates)):
            shared.register_hook(summed)  # each expert knows its own part of their gradient
        for number, expert in self.experts.items():
            mine = gates.argmax(-1) == int(number)
            part = part.index_put((mine,), expert(hidden[mine]) * gates[mine, int(number), None])
        return part + (summed(part) - part.detach())


torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
# The ranks of a pair draw the same samples.
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, num_pairs, pair)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // num_pairs, sampler=sampler)
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
obs = entrenar_py.observe(model, optimizer, sampler=loader, layout=mesh)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        obs.loss(loss, len(inputs))
        loss.backward()
        finite = torch.ones(())
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad /= num_pairs  # an expert's, too: as many ranks have it
            finite *= parameter.grad.isfinite().all()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            raise FloatingPointError("a gradient is not finite")
        optimizer.step()

obs.close()
dist.destroy_process_group()
