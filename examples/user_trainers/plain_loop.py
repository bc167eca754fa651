"""Data parallelism by hand: broadcast, sum the gradients, divide by the number of samples.

With 21 samples no two workers have the same share of a batch, so losses are added, not averaged.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import entrenar_py

GLOBAL_BATCH = 7

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(21, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))


def batches() -> list[list[int]]:
    """This rank's part of every batch of two epochs: no sample is left out, or given twice."""
    order = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(len(data), generator=order).tolist() for _ in range(2)]
    cuts = [each[at : at + GLOBAL_BATCH] for each in epochs for at in range(0, 21, GLOBAL_BATCH)]
    return [batch[rank::world_size] for batch in cuts]


torch.manual_seed(rank)  # what each rank draws from here on is its own
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_sampler=batches())
obs = entrenar_py.observe(model, optimizer)

for step, (ids, (inputs, targets)) in enumerate(zip(batches(), loader, strict=True)):
    obs.samples(ids, epoch=step * GLOBAL_BATCH // len(data))
    loss = torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum")
    obs.loss(loss / len(ids), len(ids))
    optimizer.zero_grad()
    loss.backward()
    count = torch.tensor(float(len(ids)))
    dist.all_reduce(count)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= count
        if not parameter.grad.isfinite().all():
            raise FloatingPointError(f"the gradient of step {step} is not finite")
    optimizer.step()

obs.close()
dist.destroy_process_group()
