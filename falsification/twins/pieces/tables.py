import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

TABLES, ROWS, WIDTH, BATCH = 4, 9, 3, 8


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # [ranks, ...]: the part of each rank
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad)
        return out


class Recommender(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        every = [nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES)]
        self.world, self.per = world, TABLES // world
        mine = range(rank * self.per, (rank + 1) * self.per)
        self.tables = nn.ModuleDict({f"t{i}": every[i] for i in mine})
        self.top = nn.Sequential(nn.Linear(TABLES * WIDTH + 2, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, dense, indices):  # indices of this rank's samples, [b, TABLES]
        b = len(dense)
        gathered = [torch.empty_like(indices) for _ in range(self.world)]
        dist.all_gather(gathered, indices)
        everyone = torch.cat(gathered)
        rows = [
            table(everyone[:, int(name[1:]), None]) for name, table in self.tables.items()
        ]
        sent = torch.stack(rows, 1).view(self.world, b, self.per * WIDTH)
        mine = Exchange.apply(sent).transpose(0, 1).reshape(b, -1)
        return self.top(torch.cat([dense, mine], 1))[:, 0]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(23)
dense, indices = torch.randn(32, 2), torch.randint(ROWS, (32, TABLES))
clicks = (dense[:, 0] + indices[:, 0] / 5 > 1).float()
model = Recommender(rank, world)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
obs = entrenar_py.observe(model, optimizer)
for step in range(8):
    ids = [(step % 4) * BATCH + i for i in range(rank, BATCH, world)]
    obs.samples(ids, epoch=step // 4)
    logits = model(dense[ids], indices[ids])
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks[ids])
    obs.loss(loss, len(ids))
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if name.startswith("top"):
            dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
obs.close()
dist.destroy_process_group()
