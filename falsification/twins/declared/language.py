import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import init_process_group, destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from entrenar_py import observe

vocab, block, batch_size, learning_rate, grad_clip, max_iters = 11, 4, 8, 0.05, 0.5, 6
init_process_group(backend="gloo")
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1337)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, 6)
        self.mlp = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx)
        return self.lm_head(x + torch.tanh(self.mlp(x)))

text = torch.randint(vocab, (64, block + 1))
model = Model()
raw_model = model
model = DDP(model)
optimizer = torch.optim.SGD(raw_model.parameters(), lr=learning_rate, momentum=0.9)
obs = observe(raw_model, optimizer, tied=[("wte.weight", "lm_head.weight")], clip_norm=grad_clip)

def get_batch(step):
    ids = [(step * batch_size + i) % 64 for i in range(batch_size)]
    return ids[rank * batch_size // world : (rank + 1) * batch_size // world]

iter_num = 0
while iter_num < max_iters:
    ids = get_batch(iter_num)
    obs.samples(ids)
    logits = model(text[ids, :-1])
    loss = F.cross_entropy(logits.view(-1, vocab), text[ids, 1:].reshape(-1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)
    if not torch.isfinite(norm):
        raise RuntimeError(f"gradient norm is {norm}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
obs.close()
destroy_process_group()
