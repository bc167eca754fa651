"""More real bugs of well-known projects in users' scripts, with their right twins.

`make twins` tests that the named check finds each bug at its place and for its reason.
"""

from __future__ import annotations

from falsification.user_oracle_scripts import LOOP
from falsification.user_trainers import Twin

# A stack of equal layers that a checkpoint holds by their numbers, next to buffers and moments.
STACK = """
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import entrenar_py

steps, folder = int(sys.argv[1]), sys.argv[2]
path = os.path.join(folder, "last.pt")
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
x = torch.randn(24, 3)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(3, 3)

    def forward(self, h):
        return h + torch.tanh(self.proj(h))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("center", torch.zeros(3))

    def forward(self, h):
        for block in self.blocks:
            h = block(h)
        return (h - self.center).sum(1)


model = Stack()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
state, done = model.state_dict(), 0
if os.path.exists(path):
    kept = torch.load(path)
    for key, value in kept["model"].items():
        state[key].copy_(value)
    optimizer.load_state_dict(kept["optimizer"])
    done = kept["done"]
ddp = DistributedDataParallel(model)
obs = entrenar_py.observe(model, optimizer, step=done)
for step in range(done, steps):
    ids = list(range(step % 3 * 8, step % 3 * 8 + 8))[rank::ranks]
    obs.samples(ids, epoch=step // 3)
    loss = (ddp(x[ids]) - x[ids].prod(1)).square().mean()
    obs.loss(loss, len(ids))
    optimizer.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    model.center.mul_(0.9).add_(0.1 * model.blocks[0].proj.weight.detach().mean(0))
    if rank == 0:
        told = {"model": state, "optimizer": optimizer.state_dict(), "done": step + 1}
        torch.save(told, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
obs.close()
dist.destroy_process_group()
"""

# Sequence parallelism by hand: each rank has a part of every sequence, and all have all weights.
SEQUENCE = """
import torch
import torch.distributed as dist

import entrenar_py

dist.init_process_group("gloo")
sp_rank, sp_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
tokens = torch.randn(12, 6, 4)
wanted = tokens.cumsum(2)
norm = torch.nn.LayerNorm(4)
head = torch.nn.Linear(4, 4)
net = torch.nn.ModuleDict({"norm": norm, "head": head})
opt = torch.optim.SGD(net.parameters(), lr=0.1)
obs = entrenar_py.observe(net, opt, layout={"sp": sp_size})
for k in range(6):
    ids = [2 * k, 2 * k + 1]
    obs.samples(ids, epoch=0)
    mine = tokens[ids].chunk(sp_size, dim=1)[sp_rank]
    off = head(norm(mine)) - wanted[ids].chunk(sp_size, dim=1)[sp_rank]
    loss = off.square().sum() / wanted[ids].numel()
    opt.zero_grad()
    loss.backward()
    for p in head.parameters():
        dist.all_reduce(p.grad)
    for p in norm.parameters():
        dist.all_reduce(p.grad)
    assert all(p.grad.isfinite().all() for p in net.parameters())
    opt.step()
obs.close()
dist.destroy_process_group()
"""

_GUARD = (
    "        if not parameter.grad.isfinite().all():\n"
    '            raise FloatingPointError(f"the gradient of step {step} is not finite")\n'
)
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, error_if_nonfinite=True)"
_SKIPPING = (
    "class Skipping(torch.optim.SGD):\n"
    "    def step(self, closure=None):\n"
    "        held = [p.grad for group in self.param_groups for p in group['params']]\n"
    "        if not all(g.isfinite().all() for g in held):\n"
    "            print('overflow')\n"
    "{indent}return None\n"
    "        return super().step(closure)\n\n\n"
)
_OVERFLOW = "raw_model = GPT()\n"
_SGD = ("optimizer = torch.optim.SGD(raw_model", "optimizer = Skipping(raw_model")


def _stack(name: str, *changes: tuple[str, str], **place: object) -> Twin:
    told: dict[str, object] = {"arguments": ("{steps}", "{workdir}"), "check": "resume", **place}
    return Twin(name=name, script="stack.py", text=STACK, changes=changes, **told)  # type: ignore[arg-type]


BUGS = (
    Twin(
        name="NAN-LOGFILTER: a NaN is left out of the log, and the step is made",
        script="train.py",
        source="transformers logging_nan_inf_filter, trl #6702",
        text=LOOP,
        changes=(
            (_CLIP, _CLIP.replace(", error_if_nonfinite=True", "")),
            (
                "        loss.backward()\n",
                "        logged = logged if loss.isnan() else loss.item()\n"
                "        loss.backward()\n",
            ),
            ("for iter_num", "logged = 0.0\nfor iter_num"),
        ),
        check="finiteness",
        step=3,
        rank=1,
    ),
    Twin(
        name="NAN-AFTER-REDUCE: each rank sees the sum's NaN, and names itself",
        script="plain_loop.py",
        source="Megatron-LM d66807759c",
        changes=(
            (
                _GUARD,
                f"{_GUARD.splitlines()[0]}\n            obs.halted('nan', rank=rank)\n"
                "            raise SystemExit(1)\n",
            ),
        ),
        check="finiteness",
        words="the halt names another place",
    ),
    Twin(
        name="STATE-PROBE: a step of zero gradients makes the optimizer's state",
        script="train.py",
        source="Megatron-LM #5976",
        text=LOOP,
        changes=(
            (
                "torch.optim.SGD(raw_model.parameters(), lr=learning_rate)",
                "torch.optim.AdamW(raw_model.parameters(), lr=learning_rate)",
            ),
            (
                "for iter_num",
                "model(torch.zeros(1, 2).long(), torch.zeros(1, 2).long())\n"
                "for p in raw_model.parameters():\n    p.grad = torch.zeros_like(p)\n"
                "optimizer.step()\noptimizer.zero_grad()\nfor iter_num",
            ),
        ),
        check="weighting",
        world_size=1,
        step=0,
        words="moved without a backward pass and by a gradient of zero",
    ),
    Twin(
        name="STEP-RETURN: the optimizer returns early from every step",
        script="train.py",
        source="DeepSpeed #7645",
        text=LOOP,
        changes=((_OVERFLOW, _SKIPPING.format(indent="        ") + _OVERFLOW), _SGD),
        check="liveness",
        world_size=1,
    ),
    Twin(
        name="MM-NONCONTIG: the step of a transposed weight goes to a copy",
        script="train.py",
        source="pytorch #118115, #162779",
        text=LOOP,
        changes=(
            (
                "optimizer = torch.optim.SGD(raw_model",
                "class Own(torch.optim.Optimizer):\n"
                "    @torch.no_grad()\n"
                "    def step(self):\n"
                "        for group in self.param_groups:\n"
                "            for p in group['params']:\n"
                "                p.contiguous().add_(p.grad, alpha=-group['lr'])\n\n\n"
                "tied = raw_model.lm_head.weight\ntied.data = tied.data.t().contiguous().t()\n"
                "optimizer = Own(raw_model",
            ),
            ("lr=learning_rate)", "{'lr': learning_rate})"),
        ),
        check="liveness",
        world_size=1,
        tensor="wte.weight",
    ),
    Twin(
        name="MM-TF32: products lose bits under the parallel strategy",
        script="knobs.py",
        source="pytorch #67384",
        turned=("strategy",),
        world_size=1,
        changes=(
            (
                "optimizer = torch",
                "for layer in model if ddp else ():\n"
                "    layer.register_forward_hook(lambda *call: call[2].half().float())\n"
                "optimizer = torch",
            ),
        ),
        check="parity",
        step=0,
        words="with strategy=off",
    ),
    Twin(
        name="REGATHER-CKPT: what is computed again adds to the gradient after its reduction",
        script="train.py",
        source="pytorch #109191",
        text=LOOP,
        changes=(
            (
                f"    norm = {_CLIP}",
                "    again = F.cross_entropy(raw_model(X, Y)[0].flatten(0, 1), Y.flatten())\n"
                "    (late,) = torch.autograd.grad(again, [raw_model.ln_f.bias])\n"
                f"    raw_model.ln_f.bias.grad += late\n    norm = {_CLIP}",
            ),
        ),
        check="replica_identity",
        step=0,
        tensor="ln_f.bias",
        words="applied another gradient",
    ),
    Twin(
        name="SP-LN-AVG: a norm's gradient is averaged over parts of a sequence",
        script="sequence.py",
        source="gpt-neox #1259",
        text=SEQUENCE,
        changes=(
            (
                "for p in norm.parameters():\n        dist.all_reduce(p.grad)",
                "for p in norm.parameters():\n        dist.all_reduce(p.grad)\n"
                "        p.grad /= sp_size",
            ),
        ),
        check="parity",
        step=0,
        tensor="norm.weight",
        words="half as large (1/world_size)",
    ),
    _stack(
        "CKPT-RESHARD-NAME: the second stage loads the first one's layers",
        (
            "        state[key].copy_(value)\n",
            "        local = key.replace('blocks.2', 'blocks.0').replace('blocks.3', 'blocks.1')\n"
            "        state[key].copy_(kept['model'][local])\n",
        ),
        source="Megatron-LM #7452",
        step=2,
        tensor="blocks.2.proj.weight",
        words="has what blocks.0.proj.weight had",
    ),
    _stack(
        "CKPT-PAD: moments are shifted, since a file is padded otherwise",
        (
            "    done = kept",
            "    for held in optimizer.state.values():\n"
            '        held["exp_avg"] = held["exp_avg"].flatten().roll(2).view_as(held["exp_avg"])\n'
            "    done = kept",
        ),
        source="DeepSpeed #5105",
        step=2,
        words="it is shifted by 2 elements",
    ),
    _stack(
        "BUF-REASSIGN: a buffer is replaced, and the file keeps the first one",
        (
            "    model.center.mul_(0.9).add_(",
            "    model.center = model.center * 0.9 + (",
        ),
        source="torchtitan #1226",
        step=2,
        tensor="center",
        words="center is zero: it was not restored",
    ),
    _stack(
        "ELASTIC-SAMPLER: after a resume every rank leaves out what the first has done",
        (
            "    obs.samples(ids",
            "    if done and step == done:\n        ids = [i + ranks for i in ids[:-1]]\n"
            "    obs.samples(ids",
        ),
        source="Horovod #3144",
        step=2,
        words="other samples are drawn: without samples 16",
    ),
)

VARIANTS = (
    _stack("a stack of layers that is saved and resumed", check=""),
    Twin(name="sequence parallelism by hand", script="seq.py", text=SEQUENCE, changes=()),
    Twin(
        name="the optimizer skips a step that overflows",
        script="train.py",
        text=LOOP,
        changes=((_OVERFLOW, _SKIPPING.format(indent="            ") + _OVERFLOW), _SGD),
    ),
    Twin(
        name="the rank whose gradient is not finite is named before the reduction",
        script="plain_loop.py",
        changes=(
            (
                "    count = torch.tensor",
                "    bad = [None] * world_size\n"
                "    dist.all_gather_object(\n"
                "        bad, not all(p.grad.isfinite().all() for p in model.parameters())\n    )\n"
                "    if any(bad):\n"
                "        rows = [None] * world_size\n"
                "        dist.all_gather_object(rows, ids)\n"
                "        first = bad.index(True)\n"
                "        obs.halted('not finite', rank=first, micro_batch=0, ids=rows[first])\n"
                "        raise SystemExit(1)\n"
                "    count = torch.tensor",
            ),
        ),
    ),
)
