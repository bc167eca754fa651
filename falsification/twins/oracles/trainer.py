from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 8
    grad_norm_clip: float = 0.25
    init_scale: float = 65536.0


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(32, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        return self.x[at], self.x[at].sum(0, keepdim=True)


class Trainer:
    def __init__(self, config, model, optimizer, dataset):
        self.config = config
        self.loader = DataLoader(
            dataset,
            batch_size=config.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(dataset),
        )
        self.model, self.optimizer = DistributedDataParallel(model), optimizer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=config.init_scale)
        self.obs = entrenar_py.observe(model, optimizer, sampler=self.loader)

    def _run_batch(self, source, targets):
        loss = torch.nn.functional.mse_loss(self.model(source), targets)
        self.obs.loss(loss.item(), len(source))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self._run_batch(source, targets)

    def train(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch)
        self.obs.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Points()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(TrainerConfig(), model, optimizer, dataset).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
