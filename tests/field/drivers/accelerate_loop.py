"""accelerate, as its documentation has it: `prepare`, `accumulate`, a checkpoint after each step
that a resume goes on from with `skip_first_batches`. As in its examples nothing stops at a NaN."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--seedable", action="store_true", help="the same order on any number of ranks")
parser.add_argument("--dir", help="folder of checkpoints")
arguments = parser.parse_args()

set_seed(42)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=arguments.accumulation,
    dataloader_config=DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=arguments.seedable
    ),
)
x = torch.randn(arguments.samples, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
batch_size = arguments.global_batch // arguments.accumulation
loader = DataLoader(data, batch_size=batch_size, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

done, kept = 0, Path(arguments.dir or ".", "checkpoint")
if arguments.dir and kept.exists():
    accelerator.load_state(str(kept))
    done = int((kept / "done").read_text())  # batches
epoch, passed = divmod(done, len(loader))
active = accelerator.skip_first_batches(loader, passed) if passed else loader
steps = done // arguments.accumulation
while steps < arguments.steps:
    for inputs, targets in active:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if arguments.dir:
            accelerator.save_state(str(kept))
            if accelerator.is_main_process:
                (kept / "done").write_text(str(done))
            accelerator.wait_for_everyone()
        if steps >= arguments.steps:
            break
    active = loader
accelerator.end_training()
