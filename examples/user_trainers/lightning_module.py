"""Lightning's Trainer, with accumulation and clipping.

It gives each rank a DistributedSampler by itself, and tells it the epoch; the samples divide by the
batch, or some would be given twice. It stops at nothing: the module looks at the gradients.
"""

import logging
import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from entrenar_py.integrations.lightning import ObserveCallback

GLOBAL_BATCH, MICRO_BATCHES = 12, 2
world_size = int(os.environ["WORLD_SIZE"])
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="lightning")


class Module(LightningModule):
    """A line through points."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        watch.observation.loss(loss, len(inputs))
        return loss

    def on_before_optimizer_step(self, optimizer):
        if not all(parameter.grad.isfinite().all() for parameter in self.parameters()):
            raise FloatingPointError(f"the gradient of step {self.global_step} is not finite")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


seed_everything(0)
x = torch.randn(36, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, GLOBAL_BATCH // MICRO_BATCHES // world_size, shuffle=True)
watch = ObserveCallback()
on_gpus = torch.cuda.device_count() >= world_size
Trainer(
    accelerator="gpu" if on_gpus else "cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=2,
    accumulate_grad_batches=MICRO_BATCHES,
    gradient_clip_val=1.0,
    callbacks=[watch],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Module(), loader)
