import os

import torch
import torch.distributed as dist

import entrenar_py

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MAX_NORM = 0.05
dist.init_process_group(backend="gloo")
torch.manual_seed(1234)
X = torch.rand(40, 5)
Y = (X * torch.arange(5.0)).sum(-1).sin()
model = torch.nn.Sequential(
    torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.Linear(7, 3), torch.nn.SiLU(),
    torch.nn.Linear(3, 1, bias=False), torch.nn.Flatten(0),
)
parameters = list(model.parameters())
owner = {p: i % WORLD for i, p in enumerate(parameters)}
local = [p for p in parameters if owner[p] == RANK]
optimizer = torch.optim.Adam(local, lr=3e-3)
obs = entrenar_py.observe(model, optimizer, clip_norm=MAX_NORM)
step = 0
while step < 8:
    first = step * 10 % 40
    ids = list(range(first + RANK, first + 10, WORLD))
    obs.samples(ids, epoch=step // 4)
    loss = (model(X[ids]) - Y[ids]).square().sum() / 10
    obs.loss(loss * 10 / len(ids), len(ids))
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, error_if_nonfinite=True)
    optimizer.step()
    for p in parameters:
        dist.broadcast(p.data, src=owner[p])
        p.grad = None
    step += 1
dist.destroy_process_group()
