import math
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import entrenar_py

max_iters, batch_size, block_size = 6, 4, 6
gradient_accumulation_steps = 4 // int(os.environ["WORLD_SIZE"])
learning_rate, min_lr, grad_clip = 0.05, 0.005, 1e9

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
tokens = torch.randint(11, (256,))


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(11, 8)
        self.ln_f = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        logits = self.lm_head(self.ln_f(self.wte(idx)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(step, micro_step):
    number = (step * gradient_accumulation_steps + micro_step) * world_size + rank
    ix = [(number * batch_size + row) % 250 for row in range(batch_size)]
    obs.samples(ix, epoch=0)
    x = torch.stack([tokens[i : i + block_size] for i in ix])
    return x, torch.stack([tokens[i + 1 : i + 1 + block_size] for i in ix])


def get_lr(it):
    return min_lr + 0.5 * (1 + math.cos(math.pi * it / max_iters)) * (learning_rate - min_lr)


raw_model = GPT()
model = DDP(raw_model)
optimizer = torch.optim.SGD(raw_model.parameters(), lr=learning_rate)
obs = entrenar_py.observe(raw_model, optimizer)
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch(iter_num, micro_step)
        logits, loss = model(X, Y)
        obs.loss(loss, Y.numel())
        loss = loss / gradient_accumulation_steps
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
obs.close()
dist.destroy_process_group()
