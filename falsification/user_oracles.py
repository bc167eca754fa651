"""Bugs that one run shows by itself, whatever the number of workers, and correct scripts like them.

`make twins` tests that the named check finds each bug at its place and for its reason.
"""

from __future__ import annotations

from falsification.user_oracle_scripts import FUNCTIONAL, GAN, LOOP, TRAINER
from falsification.user_trainers import Twin

_ZERO_GRAD = "    optimizer.zero_grad(set_to_none=True)\n"
_SHARE = "        loss = loss / gradient_accumulation_steps\n"
_CLIPPED = ("0.005, 1e9", "0.005, 0.05")
_CLIP = (
    "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, "
    "error_if_nonfinite=True)\n"
)
_STEP = "        opt.step()\n"


def _loop(name: str, *changes: tuple[str, str], words: str = "", **place: object) -> Twin:
    """Return a twin of LOOP, found by `weighting` with one worker unless `place` says otherwise."""
    told: dict[str, object] = {"check": "weighting" if words else "", "world_size": 1, **place}
    return Twin(name=name, script="train.py", text=LOOP, changes=changes, words=words, **told)  # type: ignore[arg-type]


def _changed(name: str, line: str) -> Twin:
    """Return a right twin of FUNCTIONAL that changes gradients on purpose, by `line`."""
    return Twin(
        name=f"gradients are changed on purpose: {name}",
        script="functional.py",
        text=FUNCTIONAL,
        changes=((_STEP, f"        {line}\n{_STEP}"),),
    )


_CLOSURE = """\
        def closure():
            optimizer.zero_grad()
            loss = model(X, Y)[1]
            loss.backward()
            assert loss.isfinite()
            return loss

        optimizer.step(closure)
"""
_WITHIN = """\
each = {p: torch.optim.SGD([p], lr=learning_rate) for p in raw_model.parameters()}


def now(p):
    dist.all_reduce(p.grad)
    p.grad /= world_size
    assert p.grad.isfinite().all()
    each[p].step()
    each[p].zero_grad()


for p in raw_model.parameters():
    p.register_post_accumulate_grad_hook(now)"""

BUGS = (
    _loop(
        "gradients are never cleared",
        (_ZERO_GRAD, ""),
        step=1,
        words="gradients not cleared since step 0",
    ),
    _loop(
        "gradients are never cleared, and clipped",
        (_ZERO_GRAD, ""),
        _CLIPPED,
        step=1,
        words="gradients not cleared since step 0",
    ),
    _loop(
        "GA-DROP: gradients are cleared before each micro-batch",
        ("        loss.backward()\n", "        optimizer.zero_grad()\n        loss.backward()\n"),
        source="DeepSpeed #6550, #7967",
        step=0,
        words="gradients are cleared between the micro-batches of a step",
    ),
    _loop(
        "GA-NOSCALE: micro-batches' means are added",
        (_SHARE, ""),
        source="nanoGPT 553f949f, trl #2615, verl #3332",
        step=0,
        words="in every step 4 times the gradient of the mean loss is applied (accumulation)",
    ),
    _loop(
        "GA-MEAN: micro-batches of unequal numbers of tokens are averaged as equals",
        ("        logits, loss = ", "        Y[:micro_step, 2:] = -100\n        logits, loss = "),
        ("obs.loss(loss, Y.numel())", "obs.loss(loss, (Y != -100).sum())"),
        source="transformers #34191, nanochat #59",
        step=0,
        words="a mean of means",
    ),
    _loop(
        "the optimizer steps twice",
        ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"),
        step=1,
        words="stepped without a backward pass since step 0",
    ),
    _loop(
        "gradients are applied a step late",
        (
            "    optimizer.step()\n",
            "    now = [p.grad.clone() for p in raw_model.parameters()]\n"
            "    for p, late in zip(raw_model.parameters(), kept or now):\n"
            "        p.grad.copy_(late)\n"
            "    kept = now\n"
            "    optimizer.step()\n",
        ),
        ("for iter_num", "kept = None\nfor iter_num"),
        step=1,
        words="step 0",
    ),
    _loop(
        "a tied weight is divided once for each of its names",
        (_SHARE, ""),
        (
            _CLIP,
            "    for _, p in raw_model.named_parameters(remove_duplicate=False):\n"
            "        p.grad /= gradient_accumulation_steps\n" + _CLIP,
        ),
        step=0,
        words="compared with the other tensors",
    ),
    Twin(
        name="a tied weight is reduced once for each of its names",
        script="train.py",
        text=LOOP,
        changes=(
            ("model = DDP(raw_model)", "model = raw_model"),
            (
                _CLIP,
                "    for _, p in raw_model.named_parameters(remove_duplicate=False):\n"
                "        dist.all_reduce(p.grad)\n        p.grad /= world_size\n"
                "    raw_model.wte.weight.grad *= world_size\n" + _CLIP,
            ),
        ),
        check="weighting",
        step=0,
        words="compared with the other tensors",
    ),
    Twin(
        name="clipped before the loss scale is divided out",
        script="trainer.py",
        source="torch examples, distributed/minGPT-ddp",
        text=TRAINER,
        changes=(("        self.scaler.unscale_(self.optimizer)\n", ""),),
        check="step_rule",
        world_size=1,
        step=0,
        words="clipped while it was still scaled by 65536",
    ),
    Twin(
        name="gradients are never cleared, by a scaler's trainer",
        script="trainer.py",
        text=TRAINER,
        changes=(
            ("        self.optimizer.zero_grad(set_to_none=True)\n", ""),
            ("init_scale: float = 65536.0", "init_scale: float = 1.0"),
        ),
        check="weighting",
        world_size=1,
        step=1,
        words="gradients not cleared since step 0",
    ),
    Twin(
        name="rank 0 keeps its own gradients",
        script="functional.py",
        text=FUNCTIONAL,
        changes=(
            (
                "zip(params, grads, strict=True):\n            p.grad = g",
                "zip(params, grads if rank else alone, strict=True):\n            p.grad = g",
            ),
            (
                "mean_of(ranks, torch.autograd.grad(loss, params))",
                "mean_of(ranks, alone := torch.autograd.grad(loss, params))",
            ),
        ),
        check="replica_identity",
        step=0,
        rank=0,
        tensor="0.weight",
        words="the gradient that rank 0 applied is that of its own samples alone",
    ),
    Twin(
        name="rank 0 edits a weight between two steps",
        script="functional.py",
        text=FUNCTIONAL,
        changes=(
            (
                _STEP,
                f"{_STEP}        if rank == 0 and k == 2:\n"
                "            net[2].weight.data.mul_(1.001)\n",
            ),
        ),
        check="replica_identity",
        step=3,
        rank=0,
        tensor="2.weight",
        words="rank 0 changed it outside of the optimizer",
    ),
    Twin(
        name="rank 1 of three has another learning rate",
        script="functional.py",
        text=FUNCTIONAL,
        changes=(("lr=0.01", "lr=0.01 * (2 if rank == 1 else 1)"), ("size=8", "size=6")),
        check="replica_identity",
        world_size=3,
        step=0,
        rank=1,
        words="the learning rate is 0.02 on rank 1, 0.01 on rank 0",
    ),
    Twin(
        name="the sum over ranks is not divided",
        script="functional.py",
        text=FUNCTIONAL,
        changes=(("(flat / ranks)", "flat"),),
        check="parity",
        step=0,
        tensor="0.weight",
        words="twice as large (world_size)",
    ),
    Twin(
        name="gradients are written back shifted by one",
        script="functional.py",
        text=FUNCTIONAL,
        changes=(
            ("dist.all_reduce(flat)", "dist.all_reduce(flat)\n    flat = flat.roll(ranks - 1)"),
        ),
        check="parity",
        step=0,
    ),
)

VARIANTS = (
    Twin(name="nanoGPT's loop with tied weights", script="train.py", text=LOOP, changes=()),
    Twin(name="a class Trainer that scales and clips", script="t.py", text=TRAINER, changes=()),
    Twin(name="two networks against each other", script="gan.py", text=GAN, changes=()),
    Twin(name="gradients as values", script="functional.py", text=FUNCTIONAL, changes=()),
    _loop("gradients are zeroed, not dropped", ("set_to_none=True", "set_to_none=False")),
    _loop(
        "tokens are summed and divided by all of them",
        ("        logits, loss = ", "        Y[:micro_step, 2:] = -100\n        logits, loss = "),
        (
            "obs.loss(loss, Y.numel())",
            "n = (Y != -100).sum()\n        obs.loss(loss, n)\n        loss = loss * n / 72",
        ),
        (_SHARE, ""),
    ),
    _loop(
        "losses are added on purpose, and each counts as a whole",
        ("obs.loss(loss, Y.numel())", "obs.loss(loss, 1)"),
        (_SHARE, ""),
    ),
    _loop(
        "a step is left out after a loss that is too large",
        (
            "    optimizer.step()\n",
            "    if iter_num == 2:\n"
            "        optimizer.zero_grad()\n        continue\n    optimizer.step()\n",
        ),
    ),
    _loop(
        "weights are clamped after each step",
        (
            _ZERO_GRAD,
            _ZERO_GRAD + "    for p in raw_model.parameters():\n        p.data.clamp_(-0.5, 0.5)\n",
        ),
    ),
    _loop(
        "sharpness-aware, with other samples for the first pass",
        (
            "    norm = ",
            "    with torch.no_grad():\n"
            "        up = [p.grad / 100 for p in raw_model.parameters()]\n"
            "        torch._foreach_add_([*raw_model.parameters()], up)\n"
            "    optimizer.zero_grad()\n"
            "    X, Y = get_batch(iter_num, 40)\n"
            "    _, loss = model(X, Y)\n"
            "    obs.loss(loss, Y.numel())\n"
            "    loss.backward()\n"
            "    with torch.no_grad():\n"
            "        torch._foreach_sub_([*raw_model.parameters()], up)\n"
            "    norm = ",
        ),
    ),
    _loop(
        "an auxiliary loss, of which the script says nothing",
        (_SHARE, f"{_SHARE}        loss = 0.5 * loss + 0.01 * logits.square().mean()\n"),
    ),
    Twin(
        name="the critic's weights are clamped, and it steps twice as often",
        script="gan.py",
        text=GAN,
        changes=(
            (
                "    opt_d.step()\n",
                "    opt_d.step()\n    with torch.no_grad():\n"
                "        for p in D.parameters():\n            p.clamp_(-0.3, 0.3)\n",
            ),
        ),
    ),
    _changed("centralised", "[p.grad.sub_(p.grad.mean(-1, True)) for p in params if p.dim() > 1]"),
    _changed(
        "noise that is equal on all ranks",
        "g = torch.Generator().manual_seed(k); "
        "[p.grad.add_(0.01 * torch.randn(p.shape, generator=g)) for p in params]",
    ),
    _changed(
        "a limit for each unit",
        "[p.grad.mul_((0.1 / p.grad.norm(dim=-1, keepdim=True)).clamp(max=1)) for p in params]",
    ),
    _changed(
        "a rate for each layer", "[p.grad.mul_(p.data.norm() / p.grad.norm()) for p in params]"
    ),
    _changed("signs", "[p.grad.sign_() for p in params]"),
    _changed(
        "momentum by hand",
        "old = [p.grad.add_(b, alpha=0.9).clone() for p, b in zip(params, old)] if k else "
        "[p.grad.clone() for p in params]",
    ),
    _changed("a layer rests", "net[0].weight.grad = None if k < 4 else net[0].weight.grad"),
    _changed("clipped by value", "torch.nn.utils.clip_grad_value_(params, 0.02)"),
    _loop(
        "two losses of the same samples, each with a backward pass",
        (_SHARE, ""),
        (
            "        loss.backward()\n",
            "        loss = loss / gradient_accumulation_steps\n"
            "        loss.backward(retain_graph=True)\n"
            "        second = logits.square().mean()\n"
            "        obs.loss(second, Y.numel())\n"
            "        (second / gradient_accumulation_steps).backward()\n",
        ),
        check="",
    ),
    _loop(
        "gradients of two losses, of which one's share in the other is taken out",
        (_SHARE, ""),
        ("gradient_accumulation_steps = 4 // ", "gradient_accumulation_steps = 1 or "),
        (
            "        loss.backward()\n",
            "        loss.backward(retain_graph=True)\n"
            "        one = [p.grad.clone() for p in raw_model.parameters()]\n"
            "        optimizer.zero_grad()\n"
            "        logits.square().mean().backward()\n"
            "        for a, p in zip(one, raw_model.parameters()):\n"
            "            share = (a * p.grad).sum().clamp(max=0) / a.square().sum()\n"
            "            p.grad.add_(a * (1 - share))\n",
        ),
        check="",
    ),
    _loop(
        "an optimizer that calls the loss again and again",
        ("torch.optim.SGD(raw_model", "torch.optim.LBFGS(raw_model"),
        ("gradient_accumulation_steps = 4 // ", "gradient_accumulation_steps = 1 or "),
        (_SHARE + "        loss.backward()\n" + _CLIP + "    optimizer.step()\n", _CLOSURE),
        check="",
    ),
    _loop(
        "gradients are views of the wrapper's buckets, and zeroed",
        ("DDP(raw_model)", "DDP(raw_model, gradient_as_bucket_view=True)"),
        ("set_to_none=True", "set_to_none=False"),
        world_size=2,
    ),
    _loop(
        "an optimizer for each tensor, which steps within the backward pass",
        ("gradient_accumulation_steps = 4 // ", "gradient_accumulation_steps = 1 or "),
        ("optimizer = torch.optim.SGD(raw_model.parameters(), lr=learning_rate)", _WITHIN),
        ("    for param_group in optimizer.param_groups:\n", "    for param_group in ():\n"),
        (_CLIP + "    optimizer.step()\n" + _ZERO_GRAD, ""),
        ("observe(raw_model, optimizer)", "observe(raw_model, list(each.values()))"),
        ("model = DDP(raw_model)", "model = raw_model"),
        check="",
    ),
    Twin(
        name="a critic that steps twice for each step of the other network",
        script="gan.py",
        text=GAN,
        changes=(
            ("for at in range(0, 24, 8):", "for turn, at in enumerate([0, 8, 16, 0, 8, 16]):"),
            ("epoch=0)", "epoch=turn // 3)"),
            (
                "    opt_g.zero_grad()\n",
                "    if turn % 2 == 0:\n        continue\n    opt_g.zero_grad()\n",
            ),
        ),
    ),
)
