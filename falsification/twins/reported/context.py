import torch
import torch.distributed as dist
import torch.nn.functional as F

import entrenar_py

dist.init_process_group("gloo")
cp, size = dist.get_rank(), dist.get_world_size()
VOCAB, LENGTH, DIM = 11, 8, 6


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(size, 1)[cp]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = torch.nn.Embedding(VOCAB, DIM)
        self.pos = torch.nn.Embedding(LENGTH, DIM)
        self.qkv = torch.nn.Linear(DIM, 3 * DIM)
        self.norm = torch.nn.LayerNorm(DIM)
        self.out = torch.nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        h = self.tok(tokens) + self.pos(positions)
        q, k, v = self.qkv(h).chunk(3, -1)
        keys, values = Gather.apply(k.contiguous()), Gather.apply(v.contiguous())
        seen = torch.arange(LENGTH)[None, :] <= positions[:, None]
        h = h + F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(self.norm(h))


torch.manual_seed(13)
text = torch.randint(0, VOCAB, (24, LENGTH + 1))
skipped = torch.rand(24, LENGTH) < torch.linspace(0.7, 0.0, LENGTH)
net = Model()
opt = torch.optim.SGD(net.parameters(), lr=0.5)
obs = entrenar_py.observe(net, opt, layout={"cp": size})
piece = slice(cp * LENGTH // size, (cp + 1) * LENGTH // size)
for step in range(6):
    ids = list(range(4 * step, 4 * step + 4))
    obs.samples(ids, epoch=0)
    tokens, labels = text[ids, :-1][:, piece], text[ids, 1:][:, piece]
    labels = labels.masked_fill(skipped[ids][:, piece], -100)
    positions = torch.arange(LENGTH)[piece]
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = F.cross_entropy(net(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
    opt.zero_grad()
    (loss / count).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
dist.destroy_process_group()
