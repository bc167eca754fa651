"""Hugging Face accelerate, with accumulation and a schedule.

With `split_batches` a loader's batch is the whole one, which the workers share: one worker and four
train on the same batches, and the schedule moves once a step. Without it each worker takes a batch,
and a schedule that was prepared moves once for every worker. The samples divide by the batch: what
is left over would be filled up with samples that were there before (`even_batches`).
"""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import entrenar_py

MICRO_BATCH, MICRO_BATCHES, EPOCHS = 6, 2, 2  # of all workers together

accelerator = Accelerator(
    cpu=torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]),
    gradient_accumulation_steps=MICRO_BATCHES,
    dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
)
torch.manual_seed(0)
x = torch.randn(36, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=MICRO_BATCH, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
obs = entrenar_py.observe(model, optimizer, sampler=loader)

for _ in range(EPOCHS):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            obs.loss(loss, len(inputs))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if not norm.isfinite():
                    raise FloatingPointError(f"gradient norm {norm}")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

obs.close()
accelerator.end_training()
