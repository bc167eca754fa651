import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

SEED, STEPS = 7, 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 8)
        self.inner = nn.Sequential(nn.Linear(14, 16), nn.SiLU(), nn.Linear(16, 6))

    def forward(self, noisy, t):
        return self.inner(torch.cat([noisy, self.time(t)], 1))


class Trainer:
    def __init__(self, net, loader):
        self.net, self.loader, self.ddp = net, loader, DDP(net)
        self.opt = torch.optim.SGD(net.parameters(), lr=0.05)
        self.obs = entrenar_py.observe(net, self.opt, sampler=loader)

    def _run_batch(self, x):
        t = torch.randint(0, STEPS, (len(x),))
        noise = torch.randn_like(x)
        keep = (1 - t / STEPS).sqrt()[:, None]
        noisy = keep * x + (1 - keep**2).sqrt() * noise
        loss = (self.ddp(noisy, t) - noise).square().mean()
        self.obs.loss(loss, len(x))
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1e9, error_if_nonfinite=True)
        self.opt.step()

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for (x,) in self.loader:
                self._run_batch(x)
        self.obs.close()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    data, net = TensorDataset(torch.randn(24, 6)), Denoiser()
    torch.manual_seed(SEED + rank)
    loader = DataLoader(data, batch_size=8 // world, sampler=DistributedSampler(data))
    trainer = Trainer(net, loader)
    trainer.train(2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
