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
