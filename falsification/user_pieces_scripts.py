"""Scripts that cut a model by hand, in plain tensors, as people write them. None declares it."""

from __future__ import annotations

# A transformer cut by heads, columns, rows and vocabulary: a class of its own for each layer.
CUT_DECODER = """\
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
"""

# A recommender: tables on one rank each, exchanged by all-to-all; dense layers in all ranks.
TABLES = """\
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
"""

# A mixture of experts: experts on one rank each, tokens sent to them and back.
EXPERTS = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py

EXPERTS, WIDTH = 4, 6


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        everyone = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.first = rank * EXPERTS // world
        self.experts = nn.Parameter(everyone[self.first :][: EXPERTS // world].clone())
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        weight, chosen = chances.max(-1)
        everyone, theirs = Gather.apply(x), Gather.apply(chosen.float())
        out = torch.zeros_like(everyone)
        for i, matrix in enumerate(self.experts):
            mask = (theirs == self.first + i).float()[:, None]
            out = out + mask * torch.tanh(everyone @ matrix)
        return x + weight[:, None] * Scatter.apply(out)


class Trainer:
    def __init__(self, model, data):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        world, rank = dist.get_world_size(), dist.get_rank()
        self.sampler = DistributedSampler(data, world, rank, shuffle=False)
        self.loader = DataLoader(data, batch_size=8 // world, sampler=self.sampler)
        self.obs = entrenar_py.observe(model, self.optimizer, sampler=self.loader)

    def reduce(self):
        for name, p in self.model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = F.mse_loss(self.model(x), y)
                self.obs.loss(loss, len(x))
                self.optimizer.zero_grad()
                loss.backward()
                self.reduce()
                self.optimizer.step()
        self.obs.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    x = torch.randn(32, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(), nn.Linear(WIDTH, 2))
    Trainer(model, TensorDataset(x, x[:, :2].sin())).fit(2)
    dist.destroy_process_group()
"""

# A pipeline whose stages count their layers from zero, with micro-batches.
COUNTED_STAGES = """\
import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(41)
layers = [
    layer
    for i in range(4)
    for layer in (nn.Linear(5 if i else 3, 5), nn.LayerNorm(5), nn.Tanh())
]
layers.append(nn.Linear(5, 1))
data, target = torch.randn(32, 3), torch.randn(32, 1)
cuts = [0, 6, 13] if world == 2 else [0, 13]
stage = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
obs = entrenar_py.observe(stage, optimizer)


def train(ids, parts):
    kept = []
    for micro in ids.chunk(parts):
        if rank == 0:
            given = data[micro]
        else:
            given = torch.empty(len(micro), 5)
            dist.recv(given, rank - 1)
            given.requires_grad_()
        out = stage(given)
        if rank == world - 1:
            out = nn.functional.mse_loss(out, target[micro]) / parts
        else:
            dist.send(out.detach(), rank + 1)
        kept.append((given, out))
    total = 0.0
    for given, out in kept:
        if rank == world - 1:
            out.backward()
            total += out.item()
        else:
            slope = torch.empty_like(out)
            dist.recv(slope, rank + 1)
            out.backward(slope)
        if rank:
            dist.send(given.grad, rank - 1)
    if rank == world - 1:
        obs.loss(total, len(ids))


for step in range(8):
    ids = torch.arange(8) + step % 4 * 8
    obs.samples(ids.tolist(), epoch=step // 4)
    train(ids, parts=4)
    optimizer.step()
    optimizer.zero_grad()
obs.close()
dist.destroy_process_group()
"""

# Sharded parameters by hand: flat, padded to a multiple of the ranks, gathered by layer.
FLAT_SHARDS = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import entrenar_py


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        world = dist.get_world_size()
        whole = torch.empty(world * shard.numel())
        dist.all_gather_into_tensor(whole, shard)
        return whole

    @staticmethod
    def backward(ctx, grad):
        world, rank = dist.get_world_size(), dist.get_rank()
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.div(world).chunk(world)[rank]


class ShardedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        layer, world = nn.Linear(inputs, outputs), dist.get_world_size()
        self.shape = layer.weight.shape
        flat = torch.cat([layer.weight.detach().reshape(-1), layer.bias.detach()])
        flat = F.pad(flat, (0, -len(flat) % world))
        self.flat = nn.Parameter(flat.chunk(world)[dist.get_rank()].clone())

    def forward(self, x):
        outputs, inputs = self.shape
        flat = Unshard.apply(self.flat)
        weight = flat[: outputs * inputs].view(outputs, inputs)
        return F.linear(x, weight, flat[outputs * inputs :][:outputs])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(53)
    x = torch.randn(32, 4)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    net = nn.Sequential(ShardedLinear(4, 6), nn.SiLU(), ShardedLinear(6, 1))
    sampler = DistributedSampler(data, world, rank, seed=3)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    obs = entrenar_py.observe(net, optimizer, sampler=loader)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = F.mse_loss(net(inputs), wanted)
            obs.loss(loss, len(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    obs.close()


main()
"""
