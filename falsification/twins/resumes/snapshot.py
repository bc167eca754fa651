# A Trainer class with _run_batch, _save_snapshot and _load_snapshot.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import entrenar_py


class ToyData(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 5, generator=generator)
        self.y = self.x @ torch.arange(5.0)[:, None] / 5

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 6)
        self.mid = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.mid(torch.tanh(self.body(x)))))


class Trainer:
    def __init__(self, model, loader, optimizer, scheduler, scaler, path, save_every, limit):
        self.gpu_id = int(os.environ["RANK"])
        self.loader = loader
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.save_every = save_every
        self.limit = limit
        self.path = path
        self.global_step = 0
        self.raw = model
        if os.path.exists(path):
            self._load_snapshot()
        self.model = DDP(model)
        self.obs = entrenar_py.observe(
            self.model, optimizer, sampler=loader, step=self.global_step
        )

    def _load_snapshot(self):
        snapshot = torch.load(self.path, weights_only=False)
        self.raw.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIM"])
        self.scheduler.load_state_dict(snapshot["SCHED"])
        self.scaler.load_state_dict(snapshot["SCALER"])
        self.global_step = snapshot["STEP"]

    def _save_snapshot(self):
        snapshot = {
            "MODEL_STATE": self.raw.state_dict(),
            "OPTIM": self.optimizer.state_dict(),
            "SCHED": self.scheduler.state_dict(),
            "SCALER": self.scaler.state_dict(),
            "STEP": self.global_step,
        }
        torch.save(snapshot, self.path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        self.obs.loss(loss, len(source))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.global_step += 1
        if self.global_step % self.save_every == 0 and self.gpu_id == 0:
            self._save_snapshot()

    def _run_epoch(self, epoch, skip):
        self.loader.sampler.set_epoch(epoch)
        for index, (source, targets) in enumerate(self.loader):
            if index < skip:
                continue
            if self.global_step >= self.limit:
                return
            self._run_batch(source, targets)

    def train(self):
        while self.global_step < self.limit:
            epoch, skip = divmod(self.global_step, len(self.loader))
            self._run_epoch(epoch, skip)
        self.obs.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int)
    parser.add_argument("--snapshot-dir")
    parser.add_argument("--save-every", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = ToyData(20)
    loader = DataLoader(
        data, batch_size=8 // dist.get_world_size(), sampler=DistributedSampler(data)
    )
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.body.parameters(), *model.mid.parameters()], "lr": 0.01},
            {"params": model.head.parameters(), "lr": 0.002, "weight_decay": 0.0},
        ]
    )
    warm = lambda step: min(1.0, (step + 1) / 3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [warm, lambda step: 0.8**step])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    path = os.path.join(args.snapshot_dir, "snapshot.pt")
    Trainer(
        model, loader, optimizer, scheduler, scaler, path, args.save_every, args.total_steps
    ).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
