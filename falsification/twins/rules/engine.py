import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py


class Rows(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(48, 6, generator=draw)
        self.y = self.x[:, :2].sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


dist.init_process_group("gloo")
torch.manual_seed(42)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10))
        self.head = nn.Linear(10, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


class Engine:
    def __init__(self, model, epochs=2, max_norm=0.5):
        self.model, self.epochs, self.max_norm = model, epochs, max_norm
        self.loader = DataLoader(
            data, 8 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1)
        )
        self.wrapped = DDP(model)
        self.configure()

    def groups(self):
        named = [*self.model.named_parameters()]
        return [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.002},
        ]

    def configure(self):
        self.optimizer = torch.optim.RMSprop(self.groups(), lr=0.004, momentum=0.5)
        warm = lambda step: min(1.0, (step + 1) / 4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm)

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.wrapped(inputs), targets)
        obs.loss(loss, len(inputs))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(
            self.model.parameters(), self.max_norm, error_if_nonfinite=True
        )
        self.optimizer.step()
        self.schedule.step()

    def fit(self):
        for epoch in range(self.epochs):
            self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.training_step(batch)


data = Rows()
engine = Engine(Model())
obs = entrenar_py.observe(engine.model, engine.optimizer, sampler=engine.loader)
engine.fit()
