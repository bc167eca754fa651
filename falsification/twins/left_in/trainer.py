import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def finite(*modules):
    for p in (p for module in modules for p in module.parameters()):
        if p.grad is not None and not p.grad.isfinite().all():
            raise FloatingPointError("a gradient is not finite")


def loader_of(*tensors):
    data = TensorDataset(*tensors)
    return DataLoader(data, 8 // world, sampler=DistributedSampler(data, seed=2))



class Callback:
    def after_step(self, trainer):
        trainer.optimizer.zero_grad(set_to_none=False)


class Trainer:
    def __init__(self, module, loader, callbacks):
        self.module, self.loader, self.callbacks = module, loader, callbacks
        self.model = DDP(module)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        self.batch = 0
        self.obs = entrenar_py.observe(self.model, self.optimizer, sampler=loader)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for inputs, labels in self.loader:
                loss = F.cross_entropy(self.model(inputs), labels)
                self.obs.loss(loss, len(inputs))
                loss.backward()
                finite(self.module)
                self.optimizer.step()
                self.batch += 1
                for callback in self.callbacks:
                    callback.after_step(self)


rows = torch.randn(48, 6)
module = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))
Trainer(module, loader_of(rows, rows[:, :3].argmax(1)), [Callback()]).fit(2)
