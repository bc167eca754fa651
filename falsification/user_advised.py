"""Scripts that follow the advice of an inconclusive reason, with broken and right twins.

The reasons are tested here, too: a right script that a check can't decide, and what it is told.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# Epochs that draw the easiest samples first, and more of them each time.
CURRICULUM = """
import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
xs = torch.randn(24, 5)
ys = xs.sin().sum(1)
easiest_first = xs.norm(dim=1).argsort().tolist()
net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(ddp, opt)
for epoch in range(3):
    pool = easiest_first[: 8 * (epoch + 1)]
    shuffled = torch.randperm(len(pool), generator=torch.Generator().manual_seed(epoch))
    pool = [pool[i] for i in shuffled.tolist()]
    for at in range(0, len(pool), 8):
        ids = pool[at : at + 8][rank::world]
        obs.samples(ids, epoch=epoch)
        opt.zero_grad()
        (ddp(xs[ids]).squeeze(1) - ys[ids]).square().mean().backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
dist.destroy_process_group()
"""
_UNTOLD = ("obs.samples(ids, epoch=epoch)", "obs.samples(ids)")
_SOME = ("epoch=epoch)", "epoch=epoch, replacement=True)")


def _twin(name: str, text: str, *changes: tuple[str, str], **place: object) -> Twin:
    script = "advised.py"
    return Twin(name=f"advice: {name}", script=script, text=text, changes=changes, **place)  # type: ignore[arg-type]


BUGS = (
    _twin(
        "a growing epoch ends when a rank's share of it is through",
        CURRICULUM,
        ("range(0, len(pool), 8)", "range(0, len(pool) // world, 8)"),
        check="coverage",
        step=1,
        words="epoch 1 ended without samples",
    ),
    _twin(
        "ranks don't split a growing epoch that nobody tells",
        CURRICULUM,
        _UNTOLD,
        ("[rank::world]", "[: 8 // world]"),
        check="coverage",
        step=0,
        words="drawn again by rank 1",
    ),
)
OPEN = (
    _twin(
        "epochs grow",
        CURRICULUM,
        check="coverage",
        verdict="inconclusive",
        words="obs.samples(ids, replacement=True)",
    ),
    _twin(
        "epochs grow, and nobody tells them",
        CURRICULUM,
        _UNTOLD,
        check="coverage",
        verdict="inconclusive",
        words="obs.samples(ids, epoch=...)",
    ),
    _twin(
        "epochs grow, and are declared to draw some samples",
        CURRICULUM,
        _SOME,
        check="coverage",
        verdict="held",
    ),
)
VARIANTS = (_twin("growing epochs", CURRICULUM),)
