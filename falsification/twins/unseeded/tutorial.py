import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import entrenar_py


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(6), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model = DDP(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.obs = entrenar_py.observe(model, optimizer, sampler=train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        self.optimizer.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                self._run_batch(source, targets)
        self.obs.close()


dist.init_process_group("gloo")
model = torch.nn.Sequential(
    torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
)
dataset = MyTrainDataset(32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(
    dataset, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(dataset)
)
Trainer(model, loader, optimizer).train(2)
dist.destroy_process_group()
