"""Self-supervised features under torch's DistributedDataParallel: those of all ranks are gathered,
normalised over the batch and decorrelated, as with Barlow Twins."""

import argparse
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="samples of each rank in a step")
parser.add_argument("--contiguous", action="store_true", help="the remedy")
arguments = parser.parse_args()
warnings.filterwarnings("ignore", category=FutureWarning)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(64, 6))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, arguments.batch, sampler=sampler):
        parts = all_gather(model(batch))
        if arguments.contiguous:
            for part in parts:
                part.register_hook(torch.Tensor.contiguous)
        features = torch.cat([part.t() for part in parts], dim=1)  # each feature, over all samples
        unit = normalize(features, dim=1)
        loss = mse_loss(unit @ unit.t(), torch.eye(len(unit)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
