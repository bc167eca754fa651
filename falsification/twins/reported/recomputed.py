import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import entrenar_py


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Dropout(0.3),
            torch.nn.Linear(2 * width, width),
        )

    def forward(self, h):
        return h + self.ffn(self.norm(h))


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(6) for _ in range(2)])
        self.score = torch.nn.Linear(6, 1)

    def forward(self, h):
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False, preserve_rng_state=True)
        return self.score(h).squeeze(-1)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
x = torch.randn(32, 6)
encoder = Encoder()
ddp = torch.nn.parallel.DistributedDataParallel(encoder)
adam = torch.optim.Adam(encoder.parameters(), lr=1e-2)
obs = entrenar_py.observe(ddp, adam)
torch.manual_seed(300 + rank)
for step in range(8):
    ids = list(range(step * 8 % 32 + rank, step * 8 % 32 + 8, world))
    obs.samples(ids, epoch=step // 4)
    loss = torch.nn.functional.mse_loss(ddp(x[ids]), x[ids].amax(1))
    obs.loss(loss, len(ids))
    adam.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    adam.step()
dist.destroy_process_group()
