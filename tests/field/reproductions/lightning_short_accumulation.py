"""Lightning divides the last, shorter accumulation of an epoch by the full number of batches."""

import torch
from lightning.pytorch import LightningModule, Trainer


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, index):
        return self.weight  # a gradient of 1 from each batch

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
module = Module()
Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, **quiet).fit(
    module, torch.utils.data.DataLoader(range(6))
)
assert module.seen == [1.0, 0.5], module.seen
print(f"seen: the mean gradient of each batch is 1, and steps are made with {module.seen}")
