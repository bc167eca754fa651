"""A recommender under torch's DistributedDataParallel: tables with sparse gradients, whose rows are
added, as their documentation has them."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="samples of each rank in a step")
parser.add_argument("--epochs", type=int, default=2)
arguments = parser.parse_args()


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.user = nn.Embedding(9, 8, sparse=True)
        self.top = nn.Linear(8, 1)

    def forward(self, words, user):
        return self.top(torch.relu(self.words(words) + self.user(user)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Recommender()
wrapped = DistributedDataParallel(model)
sparse = torch.optim.SGD([model.words.weight, model.user.weight], lr=0.1)
dense = torch.optim.SGD(model.top.parameters(), lr=0.1)
words, user = torch.randint(50, (64, 3)), torch.randint(9, (64,))
data = TensorDataset(words, user, torch.randn(64, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, arguments.batch, sampler=sampler)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for *inputs, targets in loader:
        loss = nn.functional.mse_loss(wrapped(*inputs), targets)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
dist.destroy_process_group()
