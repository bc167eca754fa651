"""Optimizers of the user's own whose step depends on the order of a group's parameters, and right
ones that look like them.

One worker steps so, too, and nobody knows the rule. `make twins` tests that a run whose groups have
their parameters in another order finds each that an equation explains, and that the right ones are
left alone. A flag, or a ratio, that stays for the next tensor looks as a design by places does: so
these are open.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import entrenar_py

"""

# A research loop with an Adam that is written in one page.
ADAM = (
    _HEAD
    + """
class Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad.square(), 1 - b2)
                m, v = state["m"] / (1 - b1**self.t), state["v"] / (1 - b2**self.t)
                p.addcdiv_(m, v.sqrt() + group["eps"], value=-group["lr"])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
x = torch.randn(48, 5)
data = TensorDataset(x, x.norm(dim=1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))
model = DDP(net)
opt = Adam(net.parameters())
obs = entrenar_py.observe(model, opt, sampler=loader)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        obs.loss(loss, len(inputs))
        opt.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())
        opt.step()
dist.destroy_process_group()
"""
)

# A trainer class that fine-tunes: the trunk is frozen at first. Lion keeps its moments in a list.
LION = (
    _HEAD
    + """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, beta=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay))
        zeros = torch.zeros_like
        self.momenta = [[zeros(p) for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self):
        for group, momenta in zip(self.param_groups, self.momenta):
            for p, momentum in zip(group["params"], momenta):
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(momentum + p.grad))
                momentum.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.trunk:
            x = x + torch.relu(layer(x))
        return self.head(x)


class FineTuner:
    def __init__(self):
        dist.init_process_group("gloo")
        torch.manual_seed(1)
        self.world = dist.get_world_size()
        self.data = TensorDataset(torch.randn(48, 32))
        self.net = Net()
        self.model = DDP(self.net, find_unused_parameters=True)
        self.optimizer = Lion(self.net.parameters())
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, 8 // self.world, sampler=self.sampler)
        self.obs = entrenar_py.observe(self.model, self.optimizer, sampler=self.loader)

    def freeze(self, frozen):
        for p in self.net.trunk.parameters():
            p.requires_grad_(not frozen)

    def fit(self):
        for epoch in range(2):
            self.sampler.set_epoch(epoch)
            for (rows,) in self.loader:
                loss = (self.model(rows) - rows.cumsum(1)).square().mean()
                self.obs.loss(loss, len(rows))
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grads = [p.grad for p in self.net.parameters() if p.grad is not None]
                if not torch.stack([g.isfinite().all() for g in grads]).all():
                    raise ValueError("not finite")
                self.optimizer.step()


FineTuner().fit()
"""
)

# What clips, scales by norms of layers, and decays matrices only, all inside of the step.
LAMB = (
    _HEAD
    + """
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.05, max_norm=1.0):
        named = dict(lr=lr, betas=betas, weight_decay=weight_decay, max_norm=max_norm)
        super().__init__(params, named)

    def _total(self):
        return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()

    @torch.no_grad()
    def step(self):
        limit = self.param_groups[0]["max_norm"]
        shrink = (limit / (self._total() + 1e-6)).clamp(max=1.0)
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                decay = group["weight_decay"] if p.ndim > 1 else 0.0
                g = p.grad * shrink
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=g * 0)
                state["step"] += 1
                state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m = state["exp_avg"] / (1 - b1 ** state["step"])
                v = state["exp_avg_sq"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + 1e-6) + decay * p
                ratio = 1.0
                if p.ndim > 1:
                    ratio = p.norm() / update.norm()
                p.sub_(group["lr"] * ratio * update)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    world = dist.get_world_size()
    tokens = torch.randint(0, 11, (48, 7))
    body = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(56, 8), nn.ReLU())
    net = nn.Sequential(*body, nn.Linear(8, 4))
    engine = DDP(net)
    optimizer = Lamb(net.parameters())
    dataset = TensorDataset(tokens, tokens.sum(1) % 4)
    sampler = DistributedSampler(dataset)
    batches = DataLoader(dataset, batch_size=8 // world, sampler=sampler)
    obs = entrenar_py.observe(engine, optimizer, sampler=batches)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (rows, labels) in enumerate(batches):
            loss = F.cross_entropy(engine(rows), labels)
            obs.loss(loss, len(rows))
            loss.backward()
            if any(not p.grad.isfinite().all() for p in net.parameters()):
                raise RuntimeError("a gradient is not finite")
            optimizer.step()
            optimizer.zero_grad()


main()
"""
)


def _of(name: str, text: str, *changes: tuple[str, str], words: str = "", **told: object) -> Twin:
    script = {ADAM: "adam.py", LION: "lion.py", LAMB: "lamb.py"}[text]
    if words:
        told = {"check": "step_rule", "words": words, **told}
    return Twin(name=f"orders: {name}", script=script, text=text, changes=changes, **told)  # type: ignore[arg-type]


_ORDER = "order of the parameters"
_FROZEN = (
    "            for (rows,) in self.loader:\n",
    "            for step, (rows,) in enumerate(self.loader):\n"
    "                self.freeze(epoch == 0 and step < 3)\n",
)
_MOMENTA = '            for p, momentum in zip(group["params"], momenta):\n'

VARIANTS = (
    _of("an Adam of one page", ADAM),
    _of("moments in a list, and a trunk that is frozen at first", LION, _FROZEN),
    _of("layers' norms, clipping and decay in one step", LAMB),
    _of(
        "noise of a generator in each step",
        ADAM,
        (
            "                p.addcdiv_(",
            "                p.add_(torch.randn_like(p), alpha=1e-3)\n                p.addcdiv_(",
        ),
    ),
    _of(
        "noise of a generator that each step seeds",
        ADAM,
        (
            "        self.t += 1\n",
            "        self.t += 1\n        g = torch.Generator().manual_seed(1000 + self.t)\n",
        ),
        (
            "                p.addcdiv_(",
            "                p.add_(torch.randn(p.shape, generator=g), alpha=1e-3)\n"
            "                p.addcdiv_(",
        ),
    ),
    _of(
        "momentum in random subspaces",
        ADAM,
        (
            "        self.t = 0\n",
            "        self.t = 0\n"
            "        for p in self.param_groups[0]['params']:\n"
            "            self.state[p]['P'] = torch.randn(4, len(p)) / 2\n",
        ),
        (
            "                if not state:\n"
            '                    state["m"], state["v"] = torch.zeros_like(p), '
            "torch.zeros_like(p)\n",
            "                P = state['P']\n"
            "                if 'm' not in state:\n"
            "                    state['m'] = torch.zeros_like(P @ p)\n"
            "                    state['v'] = state['m'].clone()\n"
            "                grad = P @ p.grad\n",
        ),
        ("lerp_(p.grad, 1 - b1)", "lerp_(grad, 1 - b1)"),
        ("lerp_(p.grad.square(), 1 - b2)", "lerp_(grad.square(), 1 - b2)"),
        (
            'p.addcdiv_(m, v.sqrt() + group["eps"], value=-group["lr"])',
            'p.sub_(group["lr"] * P.T @ (m / (v.sqrt() + group["eps"])))',
        ),
    ),
    _of(
        "one ratio of norms for a layer, and a layer without a bias",
        ADAM,
        ("nn.Linear(5, 9)", "nn.Linear(5, 9, bias=False)"),
        (
            '            for p in group["params"]:\n',
            "            layers, ratios = [], {}\n"
            '            for p in group["params"]:\n'
            "                if p.ndim > 1:\n"
            "                    layers.append([])\n"
            "                layers[-1].append(p)\n"
            "            for layer in layers:\n"
            "                w = torch.cat([p.flatten() for p in layer]).norm()\n"
            "                g = torch.cat([p.grad.flatten() for p in layer]).norm()\n"
            "                ratios.update(dict.fromkeys(layer, float(w / g)))\n"
            '            for p in group["params"]:\n',
        ),
        ('value=-group["lr"]', 'value=-group["lr"] * min(ratios[p], 2.0)'),
    ),
    _of(
        "no decay of the last layer, by its index",
        LION,
        (
            _MOMENTA,
            _MOMENTA.replace("for p, momentum in zip(", "for i, (p, momentum) in enumerate(zip(")
            .replace(":\n", ") :\n")
            .replace(") :", "):"),
        ),
        (
            "                p.mul_(1 - group",
            "                if i < 6:\n                    p.mul_(1 - 9 * group",
        ),
    ),
    _of(
        "a rate that falls from place to place",
        ADAM,
        (
            '            for p in group["params"]:',
            '            for i, p in enumerate(group["params"]):',
        ),
        ('value=-group["lr"]', 'value=-group["lr"] * 0.8**i'),
    ),
    _of(
        "layers take turns",
        LION,
        (
            _MOMENTA,
            "            self.turn = getattr(self, 'turn', -1) + 1\n"
            "            half = len(momenta) // 2\n"
            "            mine = slice(half) if self.turn % 2 else slice(half, None)\n"
            "            for p, momentum in zip(group['params'][mine], momenta[mine]):\n",
        ),
    ),
    _of(
        "one tensor moves in each step",
        LION,
        (
            _MOMENTA,
            "            self.turn = getattr(self, 'turn', -1) + 1\n"
            "            mine = [self.turn % len(momenta)]\n"
            "            for p, momentum in [(group['params'][i], momenta[i]) for i in mine]:\n",
        ),
    ),
)

_BODY = ADAM[ADAM.index("                state = self.state[p]") : ADAM.index("\n\ndist.init")]
_SHARED = """\
                m = self.kept.setdefault(p.numel(), torch.zeros(p.numel()))
                m.lerp_(p.grad.flatten(), 1 - b1)
                p.sub_(m.view_as(p), alpha=group["lr"])
"""
BUGS = (
    _of(
        "a group counts its step as each tensor comes",
        ADAM,
        (
            "                m, v = state",
            "                group['t'] = group.get('t', 0) + 1\n                m, v = state",
        ),
        ("(1 - b1**self.t)", "(1 - b1 ** group['t'])"),
        ("(1 - b2**self.t)", "(1 - b2 ** group['t'])"),
        words=_ORDER,
    ),
    _of(
        "a momentum is kept once for each size",
        ADAM,
        ("        self.t = 0\n", "        self.t, self.kept = 0, {}\n"),
        (_BODY, _SHARED),
        words=_ORDER,
    ),
    _of(
        "the step is counted for each tensor",
        ADAM,
        ("        self.t += 1\n", ""),
        (
            "                m, v = state",
            "                self.t += 1\n                m, v = state",
        ),
        words=_ORDER,
    ),
    _of(
        "moments slip where a tensor has no gradient",
        LION,
        _FROZEN,
        (
            _MOMENTA,
            _MOMENTA.replace(
                'group["params"]', '[p for p in group["params"] if p.grad is not None]'
            ),
        ),
        words=_ORDER,
    ),
    _of(
        "tensors of one shape share their moments",
        LION,
        (
            "        zeros = torch.zeros_like\n",
            "        kept = {}\n"
            "        def zeros(p):\n"
            "            return kept.setdefault(p.shape, torch.zeros_like(p))\n\n",
        ),
        words=_ORDER,
    ),
    _of(
        "what leaves biases undecayed stays for what comes after them",
        LAMB,
        (
            '            for p in group["params"]:\n',
            '            decay = group["weight_decay"]\n            for p in group["params"]:\n',
        ),
        (
            '                decay = group["weight_decay"] if p.ndim > 1 else 0.0\n',
            "                if p.ndim < 2:\n                    decay = 0.0\n",
        ),
        check="step_rule",
        verdict="held",
    ),
    _of(
        "a matrix's ratio stays for the biases after it",
        LAMB,
        ("                ratio = 1.0\n", ""),
        (
            '            b1, b2 = group["betas"]\n',
            '            ratio, (b1, b2) = 1.0, group["betas"]\n',
        ),
        check="step_rule",
        verdict="held",
    ),
)
