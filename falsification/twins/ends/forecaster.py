import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py


class Patience:
    def __init__(self, path):
        self.path, self.best, self.left = path, float("inf"), 3

    def __call__(self, score, net):
        if score < self.best:
            self.best, self.left = score, 3
            if dist.get_rank() == 0:
                torch.save(net.state_dict(), self.path)
        else:
            self.left -= 1
        return self.left == 0


class Experiment:
    def __init__(self, folder):
        torch.manual_seed(2)
        self.path = os.path.join(folder, "best.pt")
        self.net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 2))
        self.ddp = nn.parallel.DistributedDataParallel(self.net)
        series = torch.sin(torch.arange(100) / 5) + 0.1 * torch.randn(100)
        windows = series.unfold(0, 10, 1)
        self.held_out = windows[64:]
        self.data = TensorDataset(windows[:64, :8], windows[:64, 8:])
        torch.manual_seed(2 + dist.get_rank())

    def score(self):
        self.net.eval()
        with torch.no_grad():
            mean = (self.net(self.held_out[:, :8]) - self.held_out[:, 8:]).square().mean()
        self.net.train()
        return mean.item()

    def fit(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, batch_size=8, sampler=sampler)
        patience = Patience(self.path)
        obs = entrenar_py.observe(self.ddp, opt, sampler=loader)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                opt.zero_grad(set_to_none=True)
                loss = (self.ddp(x) - y).square().mean()
                obs.loss(loss, len(x))
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 9.0, error_if_nonfinite=True)
                opt.step()
            if patience(self.score(), self.net):
                break
        obs.close()
        dist.barrier()

    def test(self):
        self.net.load_state_dict(torch.load(self.path))
        print("test", self.score())


dist.init_process_group("gloo")
os.makedirs("kept", exist_ok=True)
experiment = Experiment("kept")
experiment.fit()
experiment.test()
dist.destroy_process_group()
