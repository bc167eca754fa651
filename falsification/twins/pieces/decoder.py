import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import entrenar_py

VOCAB, WIDTH, HEADS, LENGTH = 12, 8, 4, 6


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


enter, leave = _Enter.apply, _Leave.apply


def shard(weight, dim=0, blocks=1):
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [block.chunk(world, dim)[rank] for block in weight.detach().chunk(blocks, dim)]
    return nn.Parameter(torch.cat(parts, dim).clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        qkv, proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS // dist.get_world_size()
        self.qkv_weight = shard(qkv.weight, blocks=3)
        self.qkv_bias = shard(qkv.bias, blocks=3)
        self.proj_weight = shard(proj.weight, dim=1)
        self.proj_bias = nn.Parameter(proj.bias.detach().clone())

    def forward(self, x):
        b, t, _ = x.shape
        qkv = F.linear(enter(x), self.qkv_weight, self.qkv_bias)
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, -1)
        return leave(F.linear(y, self.proj_weight)) + self.proj_bias


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up, self.up_bias = shard(up.weight), shard(up.bias)
        self.down = shard(down.weight, dim=1)
        self.down_bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        hidden = F.gelu(F.linear(enter(x), self.up, self.up_bias))
        return leave(F.linear(hidden, self.down)) + self.down_bias


class VocabEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = shard(nn.Embedding(VOCAB, WIDTH).weight)
        self.first = dist.get_rank() * len(self.weight)

    def forward(self, tokens):
        local = tokens - self.first
        outside = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        return leave(rows.masked_fill(outside[..., None], 0.0))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = VocabEmbedding(), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.mlp = Attention(), MLP()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    texts = torch.randint(VOCAB, (32, LENGTH + 1))
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(texts), batch_size=8)
    obs = entrenar_py.observe(model, optimizer, sampler=loader)
    for epoch in range(2):
        for (batch,) in loader:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            obs.loss(loss, len(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    obs.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
