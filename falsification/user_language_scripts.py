"""Scripts that train language models, in styles that are not ours."""

# A loop that cuts a stream of tokens into rows, and accumulates gradients.
STREAM = """
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
destroy_process_group()
"""

# transformers' model, on conversations of unequal lengths that a collator pads.
CHATS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = LlamaConfig(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True, use_cache=False,
)
torch.manual_seed(11)
policy = LlamaForCausalLM(config)
g = torch.Generator().manual_seed(2)
rows = []
for n in torch.randint(6, 15, (32,), generator=g).tolist():
    prompt = torch.randint(3, 40, (2 + n % 3,), generator=g).tolist()
    answer = torch.randint(3, 40, (n,), generator=g).tolist()
    rows.append(([1] + prompt, answer + [2]))


def collate(examples):
    longest = max(len(p) + len(a) for p, a in examples)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for p, a in examples:
        pad = longest - len(p) - len(a)
        batch["input_ids"].append(p + a + [0] * pad)
        batch["attention_mask"].append([1] * len(p + a) + [0] * pad)
        batch["labels"].append([-100] * len(p) + a + [-100] * pad)
    return {name: torch.tensor(value) for name, value in batch.items()}


ddp = DistributedDataParallel(policy)
adam = torch.optim.AdamW(policy.parameters(), lr=5e-3)
obs = entrenar_py.observe(ddp, adam)
for update in range(4):
    chosen = list(range(8 * update, 8 * update + 8))[rank::world]
    parts = [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]
    batches = [collate([rows[i] for i in part]) for part in parts]
    num_items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    dist.all_reduce(num_items)
    for part, batch in zip(parts, batches):
        obs.samples(part, epoch=0)
        out = ddp(**batch, num_items_in_batch=num_items)
        (out.loss * world).backward()
    adam.step()
    adam.zero_grad()
dist.destroy_process_group()
"""

# Documents one after the other in a single row, told apart by their positions.
FLAT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=33, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )
)
generator = torch.Generator().manual_seed(6)
lengths = torch.randint(4, 9, (48,), generator=generator).tolist()
texts = [torch.randint(3, 33, (n,), generator=generator).tolist() for n in lengths]
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
obs = entrenar_py.observe(ddp, optimizer)


def flattened(documents):
    ids = [token for text in documents for token in text]
    labels = [label for text in documents for label in [-100, *text[1:]]]
    positions = [place for text in documents for place in range(len(text))]
    named = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor([value]) for name, value in named.items()}


for step in range(4):
    mine = list(range(12 * step, 12 * step + 12))[rank::world]
    batch = flattened([texts[i] for i in mine])
    obs.samples(mine, epoch=0)
    count = (batch["labels"] != -100).sum()
    dist.all_reduce(count)
    loss = ddp(**batch, num_items_in_batch=count).loss
    (loss * world).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

# A recurrent network over columns of a text: positions are the first dimension.
COLUMNS = """
import torch
import torch.distributed as dist
import torch.nn as nn

import entrenar_py

ntokens, bptt, columns = 21, 9, 4
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, 12)
        self.rnn = nn.LSTM(12, 12)
        self.decoder = nn.Linear(12, ntokens)

    def forward(self, source, hidden):
        output, hidden = self.rnn(self.encoder(source), hidden)
        return nn.functional.log_softmax(self.decoder(output).view(-1, ntokens), dim=1), hidden


torch.manual_seed(1111)
text = torch.randint(0, ntokens, (400 // columns, columns))[:, rank::world].contiguous()
net = RNNModel()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
obs = entrenar_py.observe(model, optimizer)
criterion = nn.NLLLoss()
hidden = None
for batch, i in enumerate(range(0, 5 * bptt, bptt)):
    data, targets = text[i : i + bptt], text[i + 1 : i + 1 + bptt].reshape(-1)
    hidden = None if hidden is None else tuple(h.detach() for h in hidden)
    obs.samples([batch * columns + c for c in range(columns)[rank::world]])
    optimizer.zero_grad()
    output, hidden = model(data, hidden)
    criterion(output, targets).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    optimizer.step()
dist.destroy_process_group()
"""
