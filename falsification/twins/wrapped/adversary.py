import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

dist.init_process_group("gloo")
torch.manual_seed(9)
words = torch.randint(20, (48, 6))
pairs = TensorDataset(words, words.sum(1) % 3)
net = DistributedDataParallel(
    nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
)
shares = DistributedSampler(pairs, seed=5)
batches = DataLoader(pairs, batch_size=4, sampler=shares)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer, sampler=batches)


@torch.no_grad()
def attack(part):
    home = [(p, p.clone()) for p in part.parameters()]
    for p, _ in home:
        p.add_(p.grad, alpha=0.3 / (p.grad.norm() + 1e-12).item())
    return home


for epoch in range(2):
    shares.set_epoch(epoch)
    for rows, wanted in batches:
        nn.functional.cross_entropy(net(rows), wanted).backward()
        home = attack(net.module[0])
        nn.functional.cross_entropy(net(rows), wanted).backward()
        with torch.no_grad():
            for p, weights in home:
                p.copy_(weights)
        nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
