import math
import os
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

block_size, vocab_size, n_embd, n_head, n_layer = 18, 29, 24, 2, 2
gradient_accumulation_steps, batch_size, max_iters = 2, 3, 4


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 48), nn.GELU(), nn.Linear(48, n_embd))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


init_process_group("gloo")
torch.manual_seed(1337)
data = torch.randint(0, vocab_size, (3000,))
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model = DDP(model)
obs = entrenar_py.observe(model, optimizer)
generator = torch.Generator().manual_seed(1337)


def get_batch():
    size = (batch_size * get_world_size(),)
    ix = torch.randint(len(data) - block_size - 2, size, generator=generator)
    ix = ix[get_rank() :: get_world_size()]
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return ix.tolist(), x, y


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        x = data[k * block_size : (k + 1) * block_size][None]
        y = data[k * block_size + 1 : (k + 1) * block_size + 1][None]
        losses[k] = model.module(x, y)[1]
    model.train()
    return losses.mean()


for iter_num in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        ix, X, Y = get_batch()
        obs.samples(ix, replacement=True)
        with nullcontext() if last else model.no_sync():
            logits, loss = model(X, Y)
            (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num == 1:
        print('val loss', float(estimate_loss()))
destroy_process_group()
