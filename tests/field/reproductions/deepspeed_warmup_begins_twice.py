"""DeepSpeed's WarmupLR gives the first two steps the rate of the first one, which is 0."""

import torch
from deepspeed.runtime.lr_schedules import WarmupLR

weight = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.AdamW([weight], lr=0.01)
schedule = WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=4)
rates, weights = [], []
for _ in range(4):
    weight.grad = torch.ones(())
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    schedule.step()  # in this order, as DeepSpeed's engine calls them
    weights.append(weight.item())
assert rates[:2] == [0.0, 0.0], rates
assert rates[2] > 0, rates
assert weights[1] == 1.0, weights
print(f"seen: rates {rates}: the first two of four steps of warm-up move nothing")
