"""Scripts with other optimizers, rules that change, and adapters: right ones, and broken ones.

A trainer class as libraries have it, with groups of its own constants, and fine-tuning of adapters
that are merged now and then. `make twins` tests that each bug is found at its place, and that the
right scripts are left alone.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import entrenar_py


class Rows(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(48, 6, generator=draw)
        self.y = self.x[:, :2].sin()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


dist.init_process_group("gloo")
torch.manual_seed(42)
"""

# Groups with and without decay, a schedule, and clipping, as trainers of libraries have them.
ENGINE = (
    _HEAD
    + """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10))
        self.head = nn.Linear(10, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


class Engine:
    def __init__(self, model, epochs=2, max_norm=0.5):
        self.model, self.epochs, self.max_norm = model, epochs, max_norm
        self.loader = DataLoader(
            data, 8 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1)
        )
        self.wrapped = DDP(model)
        self.configure()

    def groups(self):
        named = [*self.model.named_parameters()]
        return [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.002},
        ]

    def configure(self):
        self.optimizer = torch.optim.RMSprop(self.groups(), lr=0.004, momentum=0.5)
        warm = lambda step: min(1.0, (step + 1) / 4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm)

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.wrapped(inputs), targets)
        obs.loss(loss, len(inputs))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(
            self.model.parameters(), self.max_norm, error_if_nonfinite=True
        )
        self.optimizer.step()
        self.schedule.step()

    def fit(self):
        for epoch in range(self.epochs):
            self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.training_step(batch)


data = Rows()
engine = Engine(Model())
obs = entrenar_py.observe(engine.model, engine.optimizer, sampler=engine.loader)
engine.fit()
"""
)
_CONFIGURED = (
    "        self.optimizer = torch.optim.RMSprop(self.groups(), lr=0.004, momentum=0.5)\n"
)

# Adapters in the names of peft, merged where the model is evaluated.
TUNING = (
    _HEAD
    + """

class Layer(nn.Module):
    def __init__(self, base, rank=2, scaling=0.5):
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), scaling
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        low = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling * low

    @torch.no_grad()
    def merge(self, sign=1):
        delta = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight += sign * self.scaling * delta

    @torch.no_grad()
    def renew(self):
        nn.init.zeros_(self.lora_B["default"].weight)


def evaluate(model):
    pass


def after_step(model):
    pass


data = Rows()
net = nn.Sequential(Layer(nn.Linear(6, 9)), nn.SiLU(), Layer(nn.Linear(9, 2)))
loader = DataLoader(data, 8 // dist.get_world_size(), sampler=DistributedSampler(data, seed=1))
wrapped = DDP(net)
optimizer = torch.optim.Adamax([p for p in net.parameters() if p.requires_grad], lr=0.01)
obs = entrenar_py.observe(net, optimizer, sampler=loader)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(loader):
        loss = (wrapped(inputs) - targets).square().mean()
        obs.loss(loss, len(inputs))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not all(p.grad.isfinite().all() for p in net.parameters() if p.requires_grad):
            raise SystemExit("not finite")
        optimizer.step()
        after_step(net)
        if index == 3:
            evaluate(net)
"""
)
_EVALUATES = "def evaluate(model):\n    pass\n"
_AFTER = "def after_step(model):\n    pass\n"
_LAYERS = "    layers = [part for part in model if isinstance(part, Layer)]\n"
_MERGED = f"def evaluate(model):\n{_LAYERS}    [layer.merge() for layer in layers]\n"


def _engine(name: str, configured: str, **told: object) -> Twin:
    changes = ((_CONFIGURED, configured),)
    return Twin(name=name, script="engine.py", text=ENGINE, changes=changes, **told)  # type: ignore[arg-type]


def _tuning(name: str, *changes: tuple[str, str], **told: object) -> Twin:
    return Twin(name=name, script="tuning.py", text=TUNING, changes=changes, **told)  # type: ignore[arg-type]


_ADAM = "        self.optimizer = torch.optim.AdamW(self.groups(), lr=0.004, amsgrad=True)\n"
_NADAM = "        self.optimizer = torch.optim.NAdam(self.groups(), lr=0.004)\n"

VARIANTS = (
    _engine("rules: RMSprop, with groups of their own constants", _CONFIGURED),
    _engine("rules: AMSGrad", _ADAM),
    _engine(
        "rules: a class that counts, derived from NAdam",
        "        class Counted(torch.optim.NAdam):\n"
        "            def step(self, closure=None):\n"
        "                self.count = getattr(self, 'count', 0) + 1\n"
        "                return super().step(closure)\n\n"
        "        self.optimizer = Counted(self.groups(), lr=0.004)\n",
    ),
    _engine(
        "rules: momentum that changes for one group",
        "        one, other = self.groups()\n"
        "        groups = [{**one, 'momentum': 0.8, 'nesterov': True}, other]\n"
        "        self.optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.5)\n"
        "        def vary(opt, *_):\n"
        "            opt.param_groups[0]['momentum'] -= 0.02\n"
        "        self.optimizer.register_step_pre_hook(vary)\n",
    ),
    _tuning("rules: adapters that are evaluated apart"),
    _tuning(
        "rules: adapters that are merged, and taken out again",
        (_EVALUATES, f"{_MERGED}    [layer.merge(-1) for layer in layers]\n"),
    ),
    _tuning(
        "rules: adapters that are merged, and begin anew (ReLoRA)",
        (_EVALUATES, f"{_MERGED}    [layer.renew() for layer in layers]\n"),
    ),
)

BUGS = (
    _engine(
        "rules: decay is applied by the optimizer, and in a hook again",
        f"{_CONFIGURED}"
        "        @torch.no_grad()\n"
        "        def decay(opt, *_):\n"
        "            for group in opt.param_groups:\n"
        "                for p in group['params']:\n"
        "                    p.mul_(1 - group['lr'] * group['weight_decay'])\n"
        "        self.optimizer.register_step_post_hook(decay)\n",
        check="step_rule",
        step=0,
        tensor="encoder.0.weight",
        words="as in RMSprop",
    ),
    _engine(
        "rules: an average is moved in a hook, the wrong way round",
        f"{_NADAM}"
        "        average = copy.deepcopy(self.model)\n"
        "        @torch.no_grad()\n"
        "        def follow(opt, *_):\n"
        "            for slow, p in zip(average.parameters(), self.model.parameters()):\n"
        "                p.lerp_(slow, 0.1)\n"
        "        self.optimizer.register_step_post_hook(follow)\n",
        check="step_rule",
        step=0,
        words="as in NAdam",
    ),
    _engine(
        "rules: the optimizer was made for a model that was copied since",
        f"{_ADAM}        self.model = copy.deepcopy(self.model)\n"
        "        self.wrapped = DDP(self.model)\n",
        check="liveness",
    ),
    _tuning(
        "rules: adapters are merged for an evaluation, and left in",
        (_EVALUATES, _MERGED),
        source="peft: merge_adapter without unmerge_adapter",
        check="liveness",
        step=4,
        tensor="0.base_layer.weight",
        words="adapters were merged into what they adapt",
    ),
    _tuning(
        "rules: decay by hand of a frozen network, too",
        (
            _AFTER,
            "@torch.no_grad()\ndef after_step(model):\n"
            "    torch._foreach_mul_([*model.parameters()], 1 - 0.01 * 0.1)\n",
        ),
        check="liveness",
        step=1,
        words="decays weights by hand",
    ),
)
