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
# The next batch is fetched between the backward pass and the step.
FETCHED_AHEAD = """
import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
text = torch.randn(200, 5)
net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(ddp, opt)
torch.manual_seed(1337)
def get_batch():
    ix = torch.randint(len(text), (8,)).chunk(world)[rank]
    return ix.tolist(), text[ix], text[ix].sin().sum(1)
ids, x, y = get_batch()
for step in range(6):
    obs.samples(ids, replacement=True)
    out = ddp(x).squeeze(1)
    loss = (out - y).square().mean()
    obs.loss(loss, len(y))
    loss.backward()
    ids, x, y = get_batch()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
"""

# Tensor parallelism, in which all ranks have to draw one batch.
TENSOR_PARALLEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor import Shard

import entrenar_py

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(6, 8)
        self.out_proj = nn.Linear(8, 4)
    def forward(self, x):
        return self.out_proj(torch.tanh(self.in_proj(x)))
torch.manual_seed(0)
net = Toy()
PLAN = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
net = parallelize_module(net, mesh, PLAN)
opt = torch.optim.AdamW(net.parameters(), lr=0.05)
obs = entrenar_py.observe(net, opt)
for i in range(6):
    torch.manual_seed(i)
    x = torch.rand(4, 6)
    obs.samples(range(4 * i, 4 * i + 4))
    out = net(x)
    loss = out.square().sum() / 4
    whole = loss.detach().clone()
    obs.loss(whole, 4)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
"""
# Gradients are centralised on purpose, and reported before that.
_CENTRALISED = (
    "    torch.nn.utils.clip",
    "    obs.reduced()\n"
    "    for p in net.parameters():\n"
    "        p.grad -= 0.5 * p.grad.mean()\n"
    "    torch.nn.utils.clip",
)
_BY_RANK = (
    ("torch.manual_seed(1337)", "torch.manual_seed(1337 + rank)"),
    (
        "torch.randint(len(text), (8,)).chunk(world)[rank]",
        "torch.randint(len(text), (8 // world,))",
    ),
)
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
    _twin(
        "a batch is fetched ahead, and gradients are not reduced",
        FETCHED_AHEAD,
        ("out = ddp(x)", "out = net(x)"),
        check="replica_identity",
        step=0,
    ),
    _twin(
        "gradients are changed after obs.reduced(), and declared to be clipped only",
        FETCHED_AHEAD,
        _CENTRALISED,
        ("observe(ddp, opt)", "observe(ddp, opt, clip_norm=1.0)"),
        check="step_rule",
        step=0,
        words="did not move by learning rate times clipped gradient",
    ),
    _twin(
        "ranks that share a batch draw other ones",
        TENSOR_PARALLEL,
        ("torch.manual_seed(i)", "torch.manual_seed(i + 100 * rank)"),
        ("range(4 * i, 4 * i + 4)", "range(4 * i + 50 * rank, 4 * i + 4 + 50 * rank)"),
        check="coverage",
        step=0,
        rank=1,
        words="rank 1 drew other samples",
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
    _twin(
        "batches that are fetched ahead are drawn by rank",
        FETCHED_AHEAD,
        *_BY_RANK,
        check="weighting",
        verdict="inconclusive",
        words="one worker draws other samples than 2 workers: draw each batch for all workers",
    ),
    _twin(
        "gradients are changed on purpose, after obs.reduced()",
        FETCHED_AHEAD,
        _CENTRALISED,
        check="step_rule",
        verdict="inconclusive",
        words="needs a run without obs.reduced()",
    ),
    _twin(
        "gradients are reported before they are changed on purpose",
        FETCHED_AHEAD,
        _CENTRALISED,
        check="weighting",
        verdict="held",
    ),
    _twin(
        "batches that are fetched ahead are drawn for all workers",
        FETCHED_AHEAD,
        check="weighting",
        verdict="held",
    ),
)
VARIANTS = (
    _twin("growing epochs", CURRICULUM),
    _twin("a batch that is fetched ahead", FETCHED_AHEAD),
    _twin("tensor parallelism", TENSOR_PARALLEL),
    _twin(
        "sequence parallelism, with a part of the batch on each rank",
        TENSOR_PARALLEL,
        ("torch.rand(4, 6)", "torch.rand(4, 6).chunk(world)[rank]"),
        (
            '{"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}',
            '{"in_proj": ColwiseParallel(input_layouts=Shard(0)), '
            '"out_proj": RowwiseParallel(output_layouts=Shard(0))}',
        ),
        ("    obs.loss(whole, 4)", "    dist.all_reduce(whole)\n    obs.loss(whole, 4)"),
    ),
)
