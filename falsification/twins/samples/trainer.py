import os
import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split
import entrenar_py


class Toy(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.rows = [(torch.rand(6, generator=g), torch.rand(1, generator=g)) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.rank = int(os.environ["RANK"])
        self.train_data, self.optimizer = train_data, optimizer
        self.model = DDP(model)
        self.obs = entrenar_py.observe(model, optimizer, sampler=train_data)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0, error_if_nonfinite=True)
        self.optimizer.step()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11)
    model = torch.nn.Linear(6, 1)
    seed = torch.Generator().manual_seed(5)
    train, val = random_split(Toy(40), [24, 16], generator=seed)
    loader = DataLoader(train, batch_size=8 // world, sampler=DistributedSampler(train))
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.train(2)
    trainer.obs.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
