"""Lightning's Trainer with its DDP strategy, as its documentation has it: a module with a loss, a
schedule and dropout, accumulation, clipping, a checkpoint after each step."""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--dir", help="folder of checkpoints")
arguments = parser.parse_args()
world_size = int(os.environ["WORLD_SIZE"])


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.ReLU(),
            torch.nn.Dropout(arguments.dropout),
            torch.nn.Linear(16, 1),
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


seed_everything(0)
x = torch.randn(arguments.samples, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
share = arguments.global_batch // world_size // arguments.accumulation
last = Path(arguments.dir or ".", "last.ckpt")
saving = ModelCheckpoint(arguments.dir, save_last=True, every_n_train_steps=1)
Trainer(
    accelerator="auto",
    strategy="ddp",
    devices=world_size,
    max_steps=arguments.steps,
    accumulate_grad_batches=arguments.accumulation,
    gradient_clip_val=arguments.clip,
    callbacks=[saving] if arguments.dir else [],
    enable_checkpointing=bool(arguments.dir),
    logger=False,
    enable_progress_bar=False,
).fit(
    Regression(),
    DataLoader(data, batch_size=share, shuffle=True),
    ckpt_path=str(last) if last.exists() else None,
)
