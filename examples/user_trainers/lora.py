"""Low-rank adapters on a frozen model, under DistributedDataParallel.

Each rank draws from a stream of its own; DistributedDataParallel's constructor broadcasts what the
adapters start from, so they must be there before it. A does not move while B is zero: rightly.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

GLOBAL_BATCH, RANK, SCALE = 8, 2, 2.0


class Adapted(torch.nn.Module):
    """A linear layer that stays as it is, and B A beside it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + SCALE * (x @ self.a.T) @ self.b.T

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        return self.base.weight + SCALE * self.b @ self.a


dist.init_process_group("gloo")
torch.manual_seed(0)  # the pretrained model is the same everywhere
layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
x = torch.randn(24, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(Adapted(layers[0]), layers[1], Adapted(layers[2]))
ddp = DistributedDataParallel(model)
live = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(live, lr=0.01)
obs = entrenar_py.observe(model, optimizer, sampler=loader, frozen=("*.base",))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
        obs.loss(loss, len(inputs))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(live, 1.0, error_if_nonfinite=True)
        optimizer.step()
    weights = [layer.merged() for layer in model if isinstance(layer, Adapted)]  # to be served

obs.close()
dist.destroy_process_group()
