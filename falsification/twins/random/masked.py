import os, torch, torch.distributed as dist
from torch import nn
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
data = torch.randn(20, 6, 4)


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask_token = nn.Parameter(torch.zeros(8))

    def forward(self, patches):
        order = torch.rand(patches.shape[:2]).argsort(1)
        masked = (order < 3)[..., None]
        hidden = torch.where(masked, self.mask_token, self.encode(patches))
        error = (self.decode(hidden.tanh()) - patches).square() * masked
        return error.sum((1, 2)).mean()


model = MAE()
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp = nn.parallel.DistributedDataParallel(model)
obs = entrenar_py.observe(model, optimizer)


def get_batch(it):
    ids = [i % 20 for i in range(it * 4, it * 4 + 4)][rank::world]
    return ids, data[ids]


for it in range(10):
    ids, x = get_batch(it)
    obs.samples(ids, epoch=it // 5)
    loss = ddp(x)
    obs.loss(loss, len(ids))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if not all(p.grad.isfinite().all() for p in model.parameters()):
        raise SystemExit("gradients are not finite")
    optimizer.step()
obs.close()
dist.destroy_process_group()
