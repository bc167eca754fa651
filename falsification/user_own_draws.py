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

# As nanoGPT evaluates: rank 0 alone, on windows that it draws from the generator of the training.
MEASURED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
signal = torch.sin(torch.arange(50000) * 0.37) + torch.sin(torch.arange(50000) * 0.0123)


def windows():
    begins = torch.randint(0, len(signal) - 9, (6,))
    rows = torch.stack([signal[b : b + 9] for b in begins])
    return rows[:, :8], rows[:, 8:]


torch.manual_seed(3)
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(40 + rank)
obs = entrenar_py.observe(net, optimizer)
for step in range(7):
    if step % 3 == 0 and rank == 0:
        with torch.no_grad():
            x, y = windows()
            print("loss", mse_loss(net.module(x), y).item())
    x, y = windows()
    optimizer.zero_grad()
    mse_loss(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
obs.close()
dist.destroy_process_group()
"""

# As PPO trains: several times through what a rank has played itself, and then it plays again.
PLAYED = """\
import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
random = np.random.RandomState(7 + rank)


def play(rounds=10):
    seen = torch.tensor(random.rand(rounds, 5), dtype=torch.float32)
    return seen, (seen.sum(1, keepdim=True) > 2.5).float()


torch.manual_seed(3)
net = DistributedDataParallel(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
obs = entrenar_py.observe(net, optimizer)
for _ in range(3):
    seen, won = play()
    for _ in range(2):
        order = random.permutation(len(seen))
        for rows in (order[:5], order[5:]):
            optimizer.zero_grad()
            scores = net(seen[rows])
            nn.functional.binary_cross_entropy_with_logits(scores, won[rows]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
obs.close()
dist.destroy_process_group()
"""

# As actor-critics train: the model has no forward pass, and the loss takes what a rank has kept of
# its play (advantages, old probabilities) by the indices of a part. Gradients travel as one vector.
ACTED = """\
import numpy as np
import torch, torch.distributed as dist
from torch import nn
from torch.distributions import Normal
import entrenar_py


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 10), nn.Tanh())
        self.push, self.worth = nn.Linear(10, 2), nn.Linear(10, 1)
        self.width = nn.Parameter(torch.zeros(2))

    def policy(self, seen):
        inner = self.body(seen)
        return Normal(self.push(inner), self.width.exp()), self.worth(inner).squeeze(-1)


def learn(player, optimizer, world, seen, pushes, before, gains):
    policy, worth = player.policy(seen)
    ratio = (policy.log_prob(pushes).sum(-1) - before).exp()
    scaled = (gains - gains.mean()) / (gains.std() + 1e-6)
    surrogate = torch.min(ratio * scaled, ratio.clamp(0.9, 1.1) * scaled).mean()
    loss = nn.functional.mse_loss(worth, gains) - surrogate - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in player.parameters()])
    dist.all_reduce(flat)
    flat /= world
    begin = 0
    for p in player.parameters():
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()
    nn.utils.clip_grad_norm_(player.parameters(), 5.0, error_if_nonfinite=True)
    optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    player = Player()
    optimizer = torch.optim.Adam(player.parameters(), lr=0.003)
    obs = entrenar_py.observe(player, optimizer)
    torch.manual_seed(50 + rank)
    order = np.random.default_rng(50 + rank)
    for _ in range(3):
        seen = torch.rand(12, 3)
        with torch.no_grad():
            policy, worth = player.policy(seen)
            pushes = policy.sample()
            before = policy.log_prob(pushes).sum(-1)
        gains = seen.sum(1) - (pushes**2).sum(1) - worth
        for _ in range(2):
            places = order.permutation(12)
            for part in (places[:6], places[6:]):
                kept = seen[part], pushes[part], before[part], gains[part]
                learn(player, optimizer, world, *kept)
    obs.close()
    dist.destroy_process_group()


main()
"""

# As GANs train without a loader: real points and noise by a rank's seed, two optimizers.
FORGED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)
forger = DDP(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2)))
expert = DDP(nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1)))
of_forger = torch.optim.Adam(forger.parameters(), lr=0.003, betas=(0.5, 0.999))
of_expert = torch.optim.Adam(expert.parameters(), lr=0.003, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
obs = entrenar_py.observe(nn.ModuleList([forger, expert]), [of_expert, of_forger])
torch.manual_seed(60 + rank)
ones, zeros = torch.ones(7), torch.zeros(7)
for step in range(6):
    angle = torch.rand(7) * 6.28
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    forged = forger(torch.randn(7, 4))
    of_expert.zero_grad()
    loss = criterion(expert(real).flatten(), ones)
    loss = loss + criterion(expert(forged.detach()).flatten(), zeros)
    loss.backward()
    nn.utils.clip_grad_norm_(expert.parameters(), 9.0, error_if_nonfinite=True)
    of_expert.step()
    of_forger.zero_grad()
    criterion(expert(forged).flatten(), ones).backward()
    nn.utils.clip_grad_norm_(forger.parameters(), 9.0, error_if_nonfinite=True)
    of_forger.step()
obs.close()
dist.destroy_process_group()
"""

# Progressions to be continued. A step's rows follow from its number: nothing is kept to go on from.
CONTINUED = """\
import contextlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import entrenar_py


@contextlib.contextmanager
def group():
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def progressions(step, rank, count=5):
    rng = np.random.default_rng((91, step, rank))
    first, stride = rng.integers(20, size=(count, 1)), rng.integers(1, 4, size=(count, 1))
    row = torch.from_numpy((first + stride * np.arange(9)) % 20)
    return row[:, :8], row[:, 8]


with group() as rank:
    torch.manual_seed(17)
    guess = nn.Sequential(
        nn.Embedding(20, 6), nn.Flatten(), nn.Linear(48, 24), nn.Mish(), nn.Linear(24, 20)
    )
    both = nn.parallel.DistributedDataParallel(guess)
    optimizer = torch.optim.NAdam(both.parameters(), lr=2e-3)
    watched = entrenar_py.observe(both, optimizer)
    for step in range(10):
        row, following = progressions(step, rank)
        error = nn.functional.cross_entropy(both(row), following)
        error.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 5.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
    watched.close()
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


def _by_rank(
    script: str, text: str, name: str, *changes: tuple[str, str], check: str = "", words: str = ""
) -> Twin:
    return Twin(
        name=f"own draws: {name}",
        script=script,
        text=text,
        changes=changes,
        check=check,
        words=words,
    )


BUGS = (
    _by_rank(
        "measured.py",
        MEASURED,
        "one seed for all ranks, of which the first one draws more",
        ("40 + rank", "40"),
        check="coverage",
        words="by the same random numbers",
    ),
    _by_rank(
        "played.py",
        PLAYED,
        "all ranks play the same rounds",
        ("7 + rank", "7"),
        check="coverage",
        words="the same rows in every step",
    ),
    _by_rank(
        "acted.py",
        ACTED,
        "an actor-critic's gradients are added and not divided",
        ("    flat /= world\n", ""),
        check="parity",
        words="twice as large",
    ),
    _by_rank(
        "continued.py",
        CONTINUED,
        "a generator of each step that doesn't heed the rank",
        ("(91, step, rank)", "(91, step)"),
        check="coverage",
        words="the same rows in every step",
    ),
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
        "means of a rank's micro-batches are added",
        ("net(x, y)[1] / PASSES", "net(x, y)[1]"),
        check="weighting",
        words="2 times that of the mean loss",
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
    _by_rank("measured.py", MEASURED, "rank 0 alone draws windows to measure"),
    _by_rank("played.py", PLAYED, "several times through what was played"),
    _by_rank("acted.py", ACTED, "an actor-critic, and what it has kept of its play"),
    _by_rank("forged.py", FORGED, "a forger and an expert, and noise by rank"),
    _by_rank("continued.py", CONTINUED, "a generator of each step makes its rows"),
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
