"""accelerate's resume in the middle of an epoch, as its examples have it, draws other samples."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader


def epoch_of(folder, resume_step=None):
    set_seed(42)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(range(32), batch_size=4, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    if resume_step is not None:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, resume_step)
    drawn = []
    for step, batch in enumerate(loader, 1):
        drawn += batch.tolist()
        if resume_step is None and step == 3:
            accelerator.save_state(folder)
    return drawn


with tempfile.TemporaryDirectory() as folder:
    straight, resumed = epoch_of(folder), epoch_of(folder, resume_step=3)
assert straight[12:] != resumed, "the resume goes on with the same samples"
again = len(set(straight[:12]).intersection(resumed))
print(f"seen: of 20 samples after the resume, {again} were there before the stop in this epoch")
