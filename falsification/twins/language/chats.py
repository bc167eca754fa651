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
