"""Lightning resumes within an epoch, and draws the epoch's first batches again."""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
drawn = []


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        drawn.append(batch.flatten().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.arange(8.0).unsqueeze(1)
last = f"{tempfile.mkdtemp()}/last.ckpt"
trainer = Trainer(max_steps=2, enable_checkpointing=False, **QUIET)
trainer.fit(Model(), DataLoader(data, batch_size=2))
trainer.save_checkpoint(last)
Trainer(max_steps=4, **QUIET).fit(Model(), DataLoader(data, batch_size=2), ckpt_path=last)
assert drawn[2:] == drawn[:2], drawn
print(f"seen: steps 0 and 1 draw {drawn[:2]}, and so do steps 2 and 3, after the resume")
