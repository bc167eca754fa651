"""Broken and right scripts whose authors declare to `observe` what it can't see.

The scripts are written in other styles than `examples/user_trainers`. `make twins` runs all.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

# A trainer class, as tutorials have it, that trains adapters and a norm on a pretrained network.
ADAPTERS = """
import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

class LoRALinear(nn.Module):
    def __init__(self, linear, r=2):
        super().__init__()
        self.linear = linear
        self.lora_A = nn.Parameter(torch.randn(r, linear.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r))

    def forward(self, x):
        return self.linear(x) + x @ self.lora_A.T @ self.lora_B.T

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.up = LoRALinear(nn.Linear(6, 8))
        self.norm = nn.LayerNorm(8)
        self.down = LoRALinear(nn.Linear(8, 1))

    def forward(self, tokens):
        return self.down(self.norm(torch.tanh(self.up(self.embed(tokens).mean(1)))))

class Trainer:
    def __init__(self, model, optimizer, data, rank, world):
        self.model, self.optimizer, self.data = model, optimizer, data
        self.rank, self.world = rank, world
        self.obs = entrenar_py.observe(model, optimizer, frozen=FROZEN)

    def _run_batch(self, ids, epoch):
        mine = ids[self.rank :: self.world]
        self.obs.samples(mine, epoch=epoch)
        tokens, targets = self.data
        error = self.model(tokens[mine]) - targets[mine]
        loss = error.square().sum() / len(ids)
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        if any(not p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None):
            raise SystemExit("a gradient is not finite")
        self.optimizer.step()
        self._after_step()

    def _after_step(self):
        pass

    def train(self, epochs):
        for epoch in range(epochs):
            for start in range(0, 24, 8):
                self._run_batch(list(range(start, start + 8)), epoch)
        self.obs.close()

FROZEN = ("embed", "*.linear.*")

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "norm" in name)
    tokens = torch.randint(16, (24, 5))
    data = tokens, tokens.float().mean(1, keepdim=True) / 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    Trainer(model, optimizer, data, dist.get_rank(), dist.get_world_size()).train(2)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
_FREEZING = '        p.requires_grad_("lora_" in name or "norm" in name)\n'

# A language model in nanoGPT's style, whose output layer is the embedding.
LANGUAGE = """
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
"""

# Data parallelism by hand, in functions and a generator, with micro-batches and a loss scale.
ENGINE = """
import math
from dataclasses import dataclass
import torch
import torch.distributed as dist
import entrenar_py

@dataclass
class Config:
    lr: float = 0.05
    max_norm: float = 0.05
    accumulate: int = 2
    scale: float = 1.0
    batch: int = 8
    steps: int = 6
    size: int = 24

def batches(cfg, rank, world):
    for step in range(cfg.steps):
        first = step * cfg.batch % cfg.size
        ids = list(range(first, first + cfg.batch))[rank::world]
        share = len(ids) // cfg.accumulate
        yield step * cfg.batch // cfg.size, [
            ids[at : at + share] for at in range(0, len(ids), share)
        ]

def build(cfg):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    x = torch.randn(cfg.size, 5)
    return net, x, torch.stack([x.sum(1), x.prod(1)], 1)

def combine(net, world):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world

def clip(net, cfg):
    torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.max_norm, error_if_nonfinite=True)

def main(cfg=Config()):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, x, y = build(cfg)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9)
    obs = entrenar_py.observe(net, opt, clip_norm=cfg.max_norm)
    for epoch, micro in batches(cfg, rank, world):
        opt.zero_grad()
        for ids in micro:
            obs.samples(ids, epoch=epoch)
            loss = torch.nn.functional.huber_loss(net(x[ids]), y[ids])
            (loss * cfg.scale / cfg.accumulate).backward()
        combine(net, world)
        for p in net.parameters():
            p.grad /= cfg.scale
        clip(net, cfg)
        opt.step()
    obs.close()

main()
"""
_UNSCALE = "        for p in net.parameters():\n            p.grad /= cfg.scale\n"
_CLIP = (
    "    torch.nn.utils.clip_grad_norm_(net.parameters(), cfg.max_norm, error_if_nonfinite=True)\n"
)
_GUARD = (
    "    if not all(p.grad.isfinite().all() for p in net.parameters()):\n"
    '        raise FloatingPointError("gradient")\n'
)

# A trainer with a state of its own and a checkpoint, for a network with running statistics.
NORMED = """
import argparse, pathlib
import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("last", torch.zeros(size), persistent=False)

    def forward(self, x):
        if not self.training:
            return (x - self.mean) * self.scale
        mean = x.detach().mean(0)
        self.update(mean)
        return (x - mean) * self.scale

    def update(self, mean):
        self.last = mean
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.seen += 1

class State:
    def __init__(self, args):
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 6), Norm(6), nn.Tanh(), nn.Linear(6, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.step, self.file = 0, pathlib.Path(args.dir) / "state.pt"
        if self.file.exists():
            self.load(torch.load(self.file))

    def load(self, kept):
        self.net.load_state_dict(kept["net"])
        self.opt.load_state_dict(kept["opt"])
        self.step = kept["step"]

    def save(self):
        if dist.get_rank() == 0:
            kept = {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "step": self.step}
            torch.save(kept, self.file)

def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state = State(args)
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(24, 3, generator=gen)
    y = x.sin().sum(1, keepdim=True)
    observer = entrenar_py.observe(state.net, state.opt, step=state.step)
    while state.step < args.steps:
        first = state.step * 8 % 24
        ids = list(range(first, first + 8))[rank::world]
        observer.samples(ids, epoch=state.step // 3)
        loss = (state.net(x[ids]) - y[ids]).square().mean()
        observer.loss(loss, len(ids))
        loss.backward()
        for p in state.net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
            assert p.grad.isfinite().all()
        state.opt.step()
        state.opt.zero_grad()
        state.step += 1
    state.save()
    observer.close()

if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=8)
    cli.add_argument("--dir", default=".")
    train(cli.parse_args())
"""
# Two networks against each other, each with an optimizer and a clipping norm of its own.
DUEL = """
import torch
import torch.distributed as dist
from torch import nn
import entrenar_py

def averaged(network, world):
    for p in network.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    nn.utils.clip_grad_norm_(network.parameters(), 0.5, error_if_nonfinite=True)

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    draw = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    judge = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    real, noise = torch.randn(24, 2), torch.randn(24, 2)
    drawing = torch.optim.Adam(draw.parameters(), lr=1e-2)
    judging = torch.optim.Adam(judge.parameters(), lr=1e-2)
    both = nn.ModuleDict({"draw": draw, "judge": judge})
    obs = entrenar_py.observe(both, [judging, drawing], frozen=())
    for step in range(6):
        ids = [(step * 8 + i) % 24 for i in range(8)][rank::world]
        obs.samples(ids, epoch=step // 3)
        judging.zero_grad()
        drawn = draw(noise[ids])
        (judge(real[ids]) - 1).square().mean().add(judge(drawn.detach()).square().mean()).backward()
        averaged(judge, world)
        judging.step()
        drawing.zero_grad()
        (judge(drawn) - 1).square().mean().backward()
        averaged(draw, world)
        drawing.step()
    obs.close()

main()
"""
_ALIKE = (
    (
        "        self.last = mean\n",
        "        dist.all_reduce(mean)\n        mean /= dist.get_world_size()\n",
    ),
)
_DECLARED = (("step=state.step)", 'step=state.step, synchronised_buffers=["*.mean"])'),)

_NAMED = (
    Twin(
        name="declared frozen: nobody froze the pretrained network",
        script="adapters.py",
        text=ADAPTERS,
        source="classic (requires_grad_ left out)",
        changes=((_FREEZING, "        pass\n"),),
        check="liveness",
        step=0,
        rank=0,
        tensor="embed.weight",
        words="a frozen tensor changed (it requires a gradient)",
    ),
    Twin(
        name="declared frozen: the adapters are frozen by mistake",
        script="adapters.py",
        text=ADAPTERS,
        source="peft, inference_mode=True as loaded",
        changes=((_FREEZING, '        p.requires_grad_("norm" in name)\n'),),
        check="liveness",
        step=2,
        rank=0,
        tensor="up.lora_A",
        words="requires no gradient",
    ),
    Twin(
        name="declared frozen: one layer's norm is frozen with the network",
        script="adapters.py",
        text=ADAPTERS,
        changes=((_FREEZING, '        p.requires_grad_("lora_" in name)\n'),),
        check="liveness",
        rank=0,
        tensor="norm.weight",
        words="requires no gradient",
    ),
    Twin(
        name="declared frozen: weight decay by hand moves the network",
        script="adapters.py",
        text=ADAPTERS,
        source="classic (decay without gradient)",
        changes=(
            (
                "    def _after_step(self):\n        pass\n",
                "    @torch.no_grad()\n    def _after_step(self):\n"
                "        for p in self.model.parameters():\n            p.mul_(1 - 1e-3)\n",
            ),
        ),
        check="liveness",
        step=1,  # it is changed after the record of step 0
        rank=0,
        tensor="embed.weight",
        words="a frozen tensor changed: embed.weight differs",
    ),
    Twin(
        name="declared frozen: the optimizer was made before the adapters",
        script="adapters.py",
        text=ADAPTERS,
        source="accelerate #2665",
        changes=(("AdamW(model.parameters()", "AdamW(model.norm.parameters()"),),
        check="liveness",
        step=2,
        rank=0,
        tensor="up.lora_B",
        words="did not move in 3 steps",
    ),
    Twin(
        name="tied: a copy of the output layer, made by a load",
        script="language.py",
        text=LANGUAGE,
        source="pytorch load_state_dict(assign=True), transformers tie_weights after it",
        changes=(
            (
                "model = Model()\nraw_model",
                "model = Model()\nstate = {k: v.clone() for k, v in model.state_dict().items()}\n"
                "model.load_state_dict(state, assign=True)\nraw_model",
            ),
        ),
        check="replica_identity",
        step=0,
        rank=0,
        tensor="lm_head.weight",
        words="lm_head.weight is not wte.weight",
    ),
    Twin(
        name="tied: the output layer is copied after the tie, and drawn anew",
        script="language.py",
        text=LANGUAGE,
        source="classic (init_weights after tying)",
        changes=(
            (
                "raw_model = model\n",
                "model.lm_head = nn.Linear(6, vocab, bias=False)\nraw_model = model\n",
            ),
        ),
        check="replica_identity",
        step=-1,
        rank=0,
        tensor="lm_head.weight",
        words="two copies of a tied tensor that differ",
    ),
    Twin(
        name="tied: deepcopy of one half",
        script="language.py",
        text=LANGUAGE,
        world_size=1,
        changes=(
            (
                "raw_model = model\n",
                "import copy\nmodel.wte = copy.deepcopy(model.wte)\nraw_model = model\n",
            ),
        ),
        check="replica_identity",
        step=0,
        rank=0,
        tensor="lm_head.weight",
    ),
)

_CLIPPED = (
    Twin(
        name="clip_norm: each rank clips before the reduction",
        script="engine.py",
        text=ENGINE,
        source="horovod/torch/optimizer.py, synchronize before clipping",
        changes=(
            (
                "        combine(net, world)\n",
                "        clip(net, cfg)\n        combine(net, world)\n",
            ),
            (f"{_UNSCALE}        clip(net, cfg)\n", _UNSCALE),
        ),
        check="step_rule",
        step=0,
        words="each rank clipped its own gradient",
    ),
    Twin(
        name="clip_norm: after each micro-batch",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("accumulate).backward()\n", "accumulate).backward()\n            clip(net, cfg)\n"),
            (f"{_UNSCALE}        clip(net, cfg)\n", _UNSCALE),
        ),
        check="step_rule",
        step=0,
        words="after each micro-batch",
    ),
    Twin(
        name="clip_norm: while still scaled",
        script="engine.py",
        text=ENGINE,
        source="pytorch examples, minGPT: clip before unscale_",
        changes=(
            ("scale: float = 1.0", "scale: float = 1024.0"),
            (f"{_UNSCALE}        clip(net, cfg)\n", f"        clip(net, cfg)\n{_UNSCALE}"),
        ),
        check="step_rule",
        step=0,
        words="clipped while it was still scaled by 1024",
    ),
    Twin(
        name="clip_norm: by the largest element",
        script="engine.py",
        text=ENGINE,
        changes=(("cfg.max_norm, error", "cfg.max_norm, norm_type=math.inf, error"),),
        check="step_rule",
        step=0,
        words="clipped by the maximum",
    ),
    Twin(
        name="clip_norm: element by element",
        script="engine.py",
        text=ENGINE,
        changes=(
            (
                _CLIP,
                f"{_GUARD}    torch.nn.utils.clip_grad_value_(net.parameters(), cfg.max_norm)\n",
            ),
        ),
        check="step_rule",
        step=0,
        words="each element was clipped",
    ),
    Twin(
        name="clip_norm: each parameter group by its own norm",
        script="engine.py",
        text=ENGINE,
        changes=(
            (
                _CLIP,
                f"{_GUARD}    for group in (net[0], net[2]):\n"
                "        torch.nn.utils.clip_grad_norm_(group.parameters(), cfg.max_norm)\n",
            ),
        ),
        check="step_rule",
        step=0,
        words="clipped in parts",
    ),
    Twin(
        name="clip_norm: each tensor by its own norm",
        script="engine.py",
        text=ENGINE,
        world_size=1,
        changes=(
            (
                _CLIP,
                f"{_GUARD}    for p in net.parameters():\n"
                "        torch.nn.utils.clip_grad_norm_([p], cfg.max_norm)\n",
            ),
        ),
        check="step_rule",
        step=0,
        words="clipped in parts",
    ),
    Twin(
        name="clip_norm: forgotten",
        script="engine.py",
        text=ENGINE,
        changes=((_CLIP, _GUARD),),
        check="step_rule",
        step=0,
        words="longer than clip_norm=0.05",
    ),
    Twin(
        name="clip_norm: divided by the workers after clipping",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("        p.grad /= world\n", ""),
            (
                "        opt.step()\n",
                "        for p in net.parameters():\n            p.grad /= world\n"
                "        opt.step()\n",
            ),
        ),
        check="step_rule",
        step=0,
        words="divided by the 2",
    ),
    Twin(
        name="clip_norm: a tied weight counts twice in the norm",
        script="language.py",
        text=LANGUAGE,
        changes=(
            (
                "torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)",
                "torch.stack([m.weight.grad.norm() for m in raw_model.modules() "
                'if hasattr(m, "weight")] + [raw_model.mlp.bias.grad.norm()]).norm()\n'
                "    for p in raw_model.parameters():\n"
                "        p.grad *= (grad_clip / (norm + 1e-6)).clamp(max=1)",
            ),
        ),
        check="step_rule",
        step=0,
        words="counts wte.weight twice",
    ),
    Twin(
        name="clip_norm: a tied weight is twice in the list, and scaled twice",
        script="language.py",
        text=LANGUAGE,
        changes=(
            (
                "clip_grad_norm_(raw_model.parameters(), grad_clip)",
                "clip_grad_norm_([p for m in raw_model.modules() "
                "for p in m.parameters(recurse=False)], grad_clip)",
            ),
        ),
        check="step_rule",
        step=0,
        tensor="wte.weight",
        words="wte.weight is twice among",
    ),
    Twin(
        name="clip_norm: shortened with obs.reduced()",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("        clip(net, cfg)\n", "        obs.reduced()\n        clip(net, cfg)\n"),
            ("cfg.max_norm, error", "cfg.max_norm / 3, error"),
        ),
        check="step_rule",
        step=0,
        words="has not the length min(norm, clip_norm=0.05)",
    ),
    Twin(
        name="reduce_dtype: float32 declared, bfloat16 sent",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("clip_norm=cfg.max_norm", "clip_norm=cfg.max_norm, reduce_dtype=torch.float32"),
            (
                "        dist.all_reduce(p.grad)\n",
                "        wire = p.grad.bfloat16()\n        dist.all_reduce(wire)\n"
                "        p.grad = wire.float()\n",
            ),
        ),
        check="weighting",
        step=0,
        words="sums of gradients are rounded to 16 bits, and float32 is declared",
    ),
)

_BUFFERED = (
    Twin(
        name="buffers: a checkpoint of the parameters alone",
        script="resume.py",
        text=NORMED,
        world_size=1,
        changes=(
            (
                '{"net": self.net.state_dict(), ',
                '{"net": dict(self.net.named_parameters()), ',
            ),
            ('kept["net"])', 'kept["net"], strict=False)'),
        ),
        check="resume",
        rank=0,
        tensor="1.mean",
        words="is zero: it was not restored",
    ),
    Twin(
        name="buffers: BUF-REASSIGN: the saver keeps the buffers of the beginning",
        script="resume.py",
        text=NORMED,
        source="torchtitan #1226",
        changes=(
            (
                "        self.step, self.file",
                "        self.kept = self.net.state_dict()\n        self.step, self.file",
            ),
            ('{"net": self.net.state_dict(), ', '{"net": self.kept, '),
        ),
        check="resume",
        rank=0,
        tensor="1.mean",
        words="is zero: it was not restored",
    ),
    Twin(
        name="buffers: a counter that starts again",
        script="resume.py",
        text=NORMED,
        changes=(
            (
                '        self.step = kept["step"]\n',
                '        self.step = kept["step"]\n        self.net[1].seen.zero_()\n',
            ),
            ("0.9 * self.mean + 0.1 * mean", "self.mean + (mean - self.mean) / (1 + self.seen)"),
        ),
        check="resume",
        rank=0,
        tensor="1.seen",
    ),
    Twin(
        name="buffers: statistics that ranks stop synchronising",
        script="resume.py",
        text=NORMED,
        changes=(
            (
                _ALIKE[0][0],
                "        if self.seen < 3:\n            dist.all_reduce(mean)\n"
                "            mean /= dist.get_world_size()\n",
            ),
            *_DECLARED,
        ),
        check="replica_identity",
        step=3,
        tensor="1.mean",
        words="different buffers",
    ),
    Twin(
        name="buffers: one rank alone keeps an average",
        script="resume.py",
        text=NORMED,
        changes=(
            (
                "    observer = ",
                '    state.net.register_buffer("slow", state.net[0].weight.detach().clone())\n'
                "    observer = ",
            ),
            (
                "        state.step += 1\n",
                "        state.step += 1\n        if rank == 0:\n"
                "            state.net.slow.lerp_(state.net[0].weight.detach(), 0.1)\n",
            ),
        ),
        check="replica_identity",
        step=1,
        tensor="slow",
        words="different buffers",
    ),
)

_BEGUN = (
    Twin(
        name="first weights: made on no device, and never initialised",
        script="language.py",
        text=LANGUAGE,
        source="pytorch examples, fully_shard after to_empty",
        changes=(
            # Then torch fills memory that nobody wrote with NaN.
            ("torch.manual_seed(1337)\n", "torch.use_deterministic_algorithms(True)\n"),
            (
                "model = Model()\n",
                'with torch.device("meta"):\n    model = Model()\n'
                'model.to_empty(device="cpu")\nmodel.lm_head.weight = model.wte.weight\n',
            ),
            ("if not torch.isfinite(norm):", "if iter_num < 0:"),
        ),
        check="finiteness",
        step=-1,
        rank=0,
        tensor="wte.weight",
        words="weights hold NaN before the first step",
    ),
    Twin(
        name="tied: two parameters of the same memory, each stepped",
        script="language.py",
        text=LANGUAGE,
        source="classic (nn.Parameter around a tied weight)",
        changes=(
            (
                "self.lm_head.weight = self.wte.weight",
                "self.lm_head.weight = nn.Parameter(self.wte.weight.data)",
            ),
            (
                "SGD(raw_model.parameters(), lr=learning_rate, momentum=0.9)",
                "AdamW(raw_model.parameters(), lr=learning_rate)",
            ),
        ),
        check="step_rule",
        step=0,
        tensor="lm_head.weight",
        words="moves twice in each step",
    ),
    Twin(
        name="tied: the optimizer's list has the weight twice",
        script="language.py",
        text=LANGUAGE,
        source="classic (a list of modules' parameters)",
        changes=(
            (
                "SGD(raw_model.parameters()",
                "SGD([p for m in raw_model.modules() for p in m.parameters(recurse=False)]",
            ),
        ),
        check="step_rule",
        step=0,
        tensor="wte.weight",
        words="moves twice in each step",
    ),
)

BUGS = (*_NAMED, *_CLIPPED, *_BUFFERED, *_BEGUN)

VARIANTS = (
    Twin(name="declared frozen: adapters", script="adapters.py", text=ADAPTERS, changes=()),
    Twin(
        name="declared frozen: all but a few names",
        script="adapters.py",
        text=ADAPTERS,
        changes=(('("embed", "*.linear.*")', '["*", "!*.lora_?", "!norm"]'),),
    ),
    Twin(
        name="undeclared: an average of the weights in parameters without gradients",
        script="adapters.py",
        text=ADAPTERS,
        changes=(
            ("frozen=FROZEN", ""),
            (
                "        self.norm = nn.LayerNorm(8)\n",
                "        self.norm = nn.LayerNorm(8)\n"
                "        self.norm_teacher = nn.LayerNorm(8)\n",
            ),
            (_FREEZING, '        p.requires_grad_("teacher" not in name)\n'),
            (
                "    def _after_step(self):\n        pass\n",
                "    @torch.no_grad()\n    def _after_step(self):\n"
                "        pairs = zip(self.model.norm_teacher.parameters(), "
                "self.model.norm.parameters())\n"
                "        for slow, fast in pairs:\n            slow.lerp_(fast, 0.1)\n",
            ),
        ),
    ),
    Twin(name="clip_norm: always active", script="engine.py", text=ENGINE, changes=()),
    Twin(
        name="clip_norm: now and then active",
        script="engine.py",
        text=ENGINE,
        changes=(("max_norm: float = 0.05", "max_norm: float = 0.5"),),
    ),
    Twin(
        name="clip_norm: scaled, and unscaled before",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("scale: float = 1.0", "scale: float = 1024.0"),
            ("max_norm: float = 0.05", "max_norm: float = 0.5"),
        ),
    ),
    Twin(
        name="clip_norm: with obs.reduced()",
        script="engine.py",
        text=ENGINE,
        changes=(
            ("max_norm: float = 0.05", "max_norm: float = 0.5"),
            ("        clip(net, cfg)\n", "        obs.reduced()\n        clip(net, cfg)\n"),
        ),
    ),
    *(
        Twin(
            name=f"reduce_dtype: {name} by hand, {words}",
            script="engine.py",
            text=ENGINE,
            changes=(
                ("clip_norm=cfg.max_norm", f"clip_norm=cfg.max_norm{declared}"),
                (
                    "        dist.all_reduce(p.grad)\n",
                    f"        wire = p.grad.to(torch.{name})\n        dist.all_reduce(wire)\n"
                    "        p.grad = wire.float()\n",
                ),
            ),
        )
        for name in ("bfloat16", "float16")
        for words, declared in (
            ("undeclared", ""),
            ("declared", f", reduce_dtype=torch.{name}"),
        )
    ),
    Twin(
        name="reduce_dtype: of fully_shard's policy",
        script="fsdp.py",
        changes=(
            (
                "fully_shard(block, mesh=mesh)",
                "fully_shard(block, mesh=mesh, "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))",
            ),
            ("import fully_shard\n", "import MixedPrecisionPolicy, fully_shard\n"),
            ("sampler=loader)", "sampler=loader, clip_norm=1.0)"),
        ),
    ),
    Twin(
        name="clip_norm: a knob has another norm than the one declared",
        script="knobs.py",
        turned=("clip",),
        changes=(("observe(model, optimizer)", "observe(model, optimizer, clip_norm=1.0)"),),
    ),
    Twin(
        name="clip_norm: declared as the knob has it",
        script="knobs.py",
        turned=("clip", "accumulation", "loss_scale"),
        changes=(("observe(model, optimizer)", "observe(model, optimizer, clip_norm=given.clip)"),),
    ),
    Twin(
        name="first weights: the last layer is zero",
        script="plain_loop.py",
        changes=(
            (
                "torch.nn.Linear(8, 1))\n",
                "torch.nn.Linear(8, 1))\ntorch.nn.init.zeros_(model[2].weight)\n",
            ),
        ),
    ),
    Twin(
        name="first weights: one layer, which is zero",
        script="plain_loop.py",
        changes=(
            (
                "torch.nn.Sequential("
                "torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))",
                "torch.nn.Linear(4, 1)\ntorch.nn.init.zeros_(model.weight)",
            ),
        ),
    ),
    Twin(
        name="tied: two parameters of the same memory, plain SGD",
        script="language.py",
        text=LANGUAGE,
        changes=(
            (
                "self.lm_head.weight = self.wte.weight",
                "self.lm_head.weight = nn.Parameter(self.wte.weight.data)",
            ),
            (", momentum=0.9", ""),
            (", clip_norm=grad_clip", ""),
            (
                "    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip)\n",
                "    norm = torch.stack([p.grad.norm() for p in raw_model.parameters()]).norm()\n",
            ),
        ),
    ),
    Twin(name="two networks, each clipped apart", script="duel.py", text=DUEL, changes=()),
    Twin(name="buffers: of each rank", script="resume.py", text=NORMED, changes=()),
    Twin(
        name="buffers: that ranks synchronise, declared",
        script="resume.py",
        text=NORMED,
        changes=(*_ALIKE, *_DECLARED),
    ),
    Twin(
        name="buffers: that ranks synchronise, undeclared",
        script="resume.py",
        text=NORMED,
        changes=_ALIKE,
    ),
    Twin(
        name="buffers: whole numbers of each rank",
        script="resume.py",
        text=NORMED,
        changes=(
            (
                "    observer = ",
                '    state.net.register_buffer("first_row", torch.tensor(12 * rank))\n'
                "    observer = ",
            ),
            ('kept["net"])', 'kept["net"], strict=False)'),
        ),
    ),
    Twin(name="tied: one tensor", script="language.py", text=LANGUAGE, changes=()),
    Twin(
        name="tied: undeclared",
        script="language.py",
        text=LANGUAGE,
        changes=((', tied=[("wte.weight", "lm_head.weight")], clip_norm=grad_clip', ""),),
    ),
)
