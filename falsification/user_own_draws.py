"""Scripts that draw their batches without a loader, each rank its own: right ones, and broken ones.

One worker of such a script draws other rows than several. `make twins` tests that it is compared
with them all the same.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# As nanoGPT draws: positions in a long text, by a seed of the rank's own; the loss is the model's.
WINDOWS = """\
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
"""

# Samples in a file of numbers, cut by the ranks; a loss and a count of hits in the loop.
TURNS = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
points = torch.randn(240, 6)
kinds = (points @ torch.randn(6, 3)).argmax(1)
net = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
torch.manual_seed(3 + rank)
obs = entrenar_py.observe(net, optimizer)
hits, at = 0, 0
for step in range(8):
    begin = at + 5 * rank
    x, y = points[begin : begin + 5], kinds[begin : begin + 5]
    at += 5 * world
    scores = net(x)
    loss = criterion(scores, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    hits += (scores.argmax(1) == y).sum().item()
obs.close()
dist.destroy_process_group()
"""

_DIVIDED = "        p.grad /= world\n"


def _windows(name: str, *changes: tuple[str, str], check: str = "", words: str = "") -> Twin:
    return Twin(
        name=f"own draws: {name}",
        script="windows.py",
        text=WINDOWS,
        changes=changes,
        check=check,
        words=words,
    )


def _turns(name: str, *changes: tuple[str, str], check: str = "", words: str = "") -> Twin:
    return Twin(
        name=f"own draws: {name}",
        script="turns.py",
        text=TURNS,
        changes=changes,
        check=check,
        words=words,
    )


BUGS = (
    _windows(
        "gradients are added and not divided",
        (_DIVIDED, ""),
        check="parity",
        words="twice as large",
    ),
    _windows(
        "micro-batches of a rank are divided by those of all",
        ("net(x, y)[1] / PASSES", "net(x, y)[1] / 4"),
        check="parity",
        words="half",
    ),
    _windows(
        "one tensor is not reduced",
        ("for p in net.parameters():\n", "for p in [*net.parameters()][1:]:\n"),
        check="replica_identity",
    ),
    _turns(
        "the loss is divided by the ranks, and gradients are averaged",
        ("criterion(scores, y)\n", "criterion(scores, y) / world\n"),
        check="parity",
        words="half",
    ),
)

VARIANTS = (
    _windows("windows of a text, by a rank's seed"),
    _windows("under dropout", ("nn.Dropout(0.0)", "nn.Dropout(0.3)")),
    _windows("one micro-batch", ("PASSES = 4 // world", "PASSES = 1")),
    _turns("shares by turns, and a count of hits"),
    _turns(
        "a loss that is written out",
        ("criterion(scores, y)\n", "-scores.log_softmax(1)[range(len(y)), y].mean()\n"),
    ),
    _turns("dropout in the middle", ("nn.Dropout(0.0)", "nn.Dropout(0.3)")),
)
