import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 2) for _ in range(3)])

    def forward(self, x, labels):
        share = self.router(x).softmax(-1)
        logits = sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        load = F.one_hot(share.argmax(-1), 3).float().mean(0)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "balance": 3 * (load * share.mean(0)).sum(),
        }


class Trainer:
    def __init__(self, model, data):
        self.model, self.wrapped = model, DDP(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
        self.loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=3))
        self.obs = entrenar_py.observe(model, self.optimizer, sampler=self.loader)

    def compute_loss(self, x, y):
        count = torch.tensor(len(x))
        dist.all_reduce(count)
        out = self.wrapped(x, labels=y)
        return out["loss"] * world / count + 0.3 * out["balance"]

    def train(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = self.compute_loss(x, y)
                self.obs.loss(loss, len(x))
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e9, error_if_nonfinite=True)
                self.optimizer.step()


torch.manual_seed(6)
x = torch.randn(32, 5)
Trainer(Routed(), TensorDataset(x, (x[:, 0] > x[:, 1]).long())).train(2)
