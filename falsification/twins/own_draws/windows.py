import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
import entrenar_py


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop = nn.Embedding(23, 12), nn.Dropout(0.0)
        self.mix, self.head = nn.Linear(12, 12), nn.Linear(12, 23)

    def forward(self, tokens, targets):
        x = self.drop(self.table(tokens))
        scores = self.head((x + self.mix(x.cumsum(1))).tanh())
        return scores, cross_entropy(scores.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
text = torch.randint(23, (90000,), generator=torch.Generator().manual_seed(5))
PASSES = 4 // world


def draw(rows=5, length=7):
    begins = torch.randint(len(text) - length, (rows,)).tolist()
    x = torch.stack([text[n : n + length] for n in begins])
    return x, torch.stack([text[n + 1 : n + 1 + length] for n in begins])


torch.manual_seed(1)
net = Model()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
obs = entrenar_py.observe(net, optimizer)
x, y = draw()
for step in range(6):
    for _ in range(PASSES):
        loss = net(x, y)[1] / PASSES
        x, y = draw()
        loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(net.parameters(), 10.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
obs.close()
dist.destroy_process_group()
