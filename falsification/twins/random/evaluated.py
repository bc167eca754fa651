import copy, os, random, numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Runner:
    def __init__(self, cfg):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        g = torch.Generator().manual_seed(11)
        x = torch.randn(40, 5, generator=g)
        y = (x.sum(1) > 0).long()
        self.train_set, self.val_set = (
            TensorDataset(x[:32], y[:32]),
            TensorDataset(x[32:], y[32:]),
        )
        set_seed(cfg["seed"])
        self.model = nn.Sequential(
            nn.Linear(5, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 2)
        )
        set_seed(cfg["seed"] + self.rank)
        self.ema = copy.deepcopy(self.model)
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.loader = DataLoader(
            self.train_set,
            cfg["batch"] // self.world,
            sampler=DistributedSampler(self.train_set, seed=5),
        )
        self.val = DataLoader(self.val_set, 4, shuffle=True)
        self.obs = entrenar_py.observe(self.model, self.opt, sampler=self.loader)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        correct = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.val)
        self.model.train()
        if self.rank == 0:
            with torch.no_grad():
                self.ema(torch.randn(3, 5))
            if random.random() < 2:
                print("val", correct, np.random.rand())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
                self.obs.loss(loss, len(y))
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
                self.opt.step()
                with torch.no_grad():
                    for a, b in zip(self.ema.parameters(), self.model.parameters()):
                        a.lerp_(b, 0.1)
            self.evaluate()
        self.obs.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    Runner({"seed": 42, "batch": 8}).fit(2)
