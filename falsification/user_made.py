"""Models that are given what the script made: noise, what another model dreams, its own answers.

No data set has these, and the samples of a loader's batch are those that they were made of.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
"""

# Twice the critic for each step of the dreamer, as in WGAN; the dreams of one batch train both.
DREAMS = (
    _HEAD
    + """
things = torch.randn(48, 5).cumsum(1)
shares = DistributedSampler(things, seed=3)
loader = DataLoader(things, batch_size=12 // world, sampler=shares)
dreamer = DDP(nn.Sequential(nn.Linear(3, 12), nn.SiLU(), nn.Linear(12, 5)))
critic = DDP(nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 1)))
of_dreamer = torch.optim.RMSprop(dreamer.parameters(), lr=1e-3)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
obs = entrenar_py.observe(nn.ModuleDict({"d": dreamer, "c": critic}), [of_critic, of_dreamer])
torch.manual_seed(70 + rank)
for epoch in range(2):
    shares.set_epoch(epoch)
    for real in loader:
        of_critic.zero_grad()
        (-critic(real).mean()).backward()
        dreams = dreamer(torch.rand(len(real), 3))
        loss = critic(dreams.detach()).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1e3, error_if_nonfinite=True)
        of_critic.step()
        of_dreamer.zero_grad()
        (-critic(dreams).mean()).backward()
        nn.utils.clip_grad_norm_(dreamer.parameters(), 1e3, error_if_nonfinite=True)
        of_dreamer.step()
dist.destroy_process_group()
"""
)

# Answers are sampled from the policy, and trained on twice: tokens after an end don't count.
ANSWERS = (
    _HEAD
    + """
questions = torch.randint(2, 15, (36, 3), generator=torch.Generator().manual_seed(1))
shares = DistributedSampler(questions, seed=3)
loader = DataLoader(questions, batch_size=6 // world, sampler=shares)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mixed, self.out = nn.Embedding(15, 8), nn.GRU(8, 16, batch_first=True), \
nn.Linear(16, 15)

    def forward(self, ids):
        return self.out(self.mixed(self.words(ids))[0]).log_softmax(-1)


policy = DDP(Policy())
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
obs = entrenar_py.observe(policy, optimizer)
torch.manual_seed(70 + rank)


@torch.no_grad()
def answered(asked, length=6):
    ids = asked.repeat_interleave(4, 0)
    for _ in range(length):
        chances = policy.module(ids)[:, -1].exp()
        ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    return ids


for epoch in range(2):
    shares.set_epoch(epoch)
    for asked in loader:
        ids = answered(asked)
        answers = ids[:, 3:]
        ended = (answers < 4).int()
        mask = (ended.cumsum(1) - ended == 0).float()
        worth = ((answers == ids[:, :1]) * mask).sum(1) - 0.1 * mask.sum(1)
        gain = (worth - worth.view(-1, 4).mean(1).repeat_interleave(4))[:, None]
        tokens = mask.sum()
        dist.all_reduce(tokens)
        before = None
        for _ in range(2):
            said = policy(ids)[:, 2:-1].gather(-1, answers[..., None]).squeeze(-1)
            before = said.detach() if before is None else before
            ratio = (said - before).exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            optimizer.zero_grad()
            ((loss * mask).sum() * world / tokens).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1e3, error_if_nonfinite=True)
            optimizer.step()
dist.destroy_process_group()
"""
)


def _dreams(name: str, *changes: tuple[str, str], check: str = "", words: str = "") -> Twin:
    return Twin(
        name=f"made: {name}",
        script="dreams.py",
        text=DREAMS,
        changes=changes,
        check=check,
        words=words,
    )


def _answers(name: str, *changes: tuple[str, str], check: str = "", words: str = "") -> Twin:
    return Twin(
        name=f"made: {name}",
        script="answers.py",
        text=ANSWERS,
        changes=changes,
        check=check,
        words=words,
    )


BUGS = (
    _dreams(
        "all ranks dream alike",
        ("70 + rank", "70"),
        check="randomness",
        words="draws the same random numbers as rank 0",
    ),
    _dreams(
        "the loss of dreams is divided by the ranks, and gradients are averaged",
        ("critic(dreams.detach()).mean()", "critic(dreams.detach()).mean() / world"),
        check="parity",
    ),
    _dreams(
        "the dreamer's gradients are not averaged",
        ("dreamer(torch.rand", "dreamer.module(torch.rand"),
        check="replica_identity",
    ),
    _answers(
        "all ranks sample alike",
        ("70 + rank", "70"),
        check="randomness",
        words="draws the same random numbers as rank 0",
    ),
    _answers(
        "gradients are averaged, and divided by the ranks before",
        (".sum() * world / tokens", ".sum() / tokens"),
        check="parity",
        words="half",
    ),
)

VARIANTS = (
    _dreams("a critic of things and dreams"),
    _answers("answers of the policy, each trained on twice"),
)
