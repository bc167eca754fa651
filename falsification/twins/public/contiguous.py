import torch, torch.distributed as dist
from torch import nn
import entrenar_py

VOCAB, BATCH, SEQ, STEPS = 24, 4, 8, 8


class Text:
    def __init__(self, tokens, rank, world):
        self.tokens, self.rank, self.world, self.at = tokens, rank, world, 0

    def next_batch(self):
        start = self.at + self.rank * BATCH * SEQ
        part = self.tokens[start : start + BATCH * SEQ + 1]
        self.at += BATCH * SEQ * self.world
        return part[:-1].view(BATCH, SEQ), part[1:].view(BATCH, SEQ)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.randint(0, VOCAB, (4096,), generator=torch.Generator().manual_seed(2))
net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCAB))
batches = Text(text, rank, world)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
decay = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 3))
obs = entrenar_py.observe(net, opt)
for step in range(STEPS):
    x, y = batches.next_batch()
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 1e9, error_if_nonfinite=True)
    opt.step()
    decay.step()
    opt.zero_grad(set_to_none=True)
obs.close()
dist.destroy_process_group()
