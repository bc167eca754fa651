"""torch's DDP tutorial saves the number of the last epoch as the number of epochs that were run."""

import os
import tempfile

import torch
import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
import multigpu_torchrun as script

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
snapshot = tempfile.mktemp()
trained = []
script.Trainer._run_epoch = lambda self, epoch: trained.append(epoch)
for epochs in (2, 4):  # the second Trainer goes on where the first one ended
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    script.Trainer(model, [], optimizer, save_every=1, snapshot_path=snapshot).train(epochs)
assert trained == [0, 1, 1, 2, 3], trained
print(f"seen: with a resume after two epochs the epochs that are trained are {trained}")
