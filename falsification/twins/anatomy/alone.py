"""One process: micro-batches, a loss scale, clipping, a schedule, an average, an evaluation."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1))
head = nn.Linear(6, 1)
model = nn.Sequential(body, head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = StepLR(optimizer, 1, 0.9)
average = AveragedModel(model)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

for epoch in range(2):
    for index, (inputs, targets) in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets) / 2
        scaler.scale(loss).backward()
        if index % 2 == 0:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        print(nn.functional.mse_loss(model(x), y).item())
    model.train()
