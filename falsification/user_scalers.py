"""Scripts that skip non-finite steps, clip or compress, in correct and in wrong variants."""

from __future__ import annotations

from falsification.user_trainers import Twin

_LOOK = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
_NO_ERROR = (", error_if_nonfinite=True", "")
_ADAM = (
    "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), lr=0.01)",
)


def _skip(*lines: str, when: str = "not norm.isfinite()") -> tuple[str, str]:
    """Return a change that inserts `lines` and `continue`, under `if when`, before the step."""
    told = [f"        if {when}:\n", *(f"            {line}\n" for line in (*lines, "continue"))]
    return "        optimizer.step()\n", "".join((*told, "        optimizer.step()\n"))


def _scaled(scale: str) -> tuple[tuple[str, str], ...]:
    """Return the changes that add a GradScaler with the initial scale `scale`."""
    return (
        ("obs = ent", f"scaler = torch.amp.GradScaler(device.type, init_scale={scale})\nobs = ent"),
        ("        loss.backward()\n", "        scaler.scale(loss).backward()\n"),
        (
            f"        {_LOOK}        optimizer.step()\n",
            "        scaler.unscale_(optimizer)\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        scaler.step(optimizer)\n        scaler.update()\n",
        ),
    )


# A scaler of sharded parameters: a rank with finite pieces does not see those of other ranks.
_IN_PIECES = (
    ("obs = ent", "scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)\nobs = ent"),
    ("        loss.backward()\n", "        scaler.scale(loss).backward()\n"),
    (
        f"        {_LOOK.removeprefix('norm = ')}        optimizer.step()\n",
        "        scale = scaler.get_scale()\n"
        "        scaler.step(optimizer)\n        scaler.update()\n"
        "        if scaler.get_scale() < scale:\n            obs.skipped()\n",
    ),
)

VARIANTS = (
    Twin(
        name="a GradScaler skips the step of a NaN",
        script="ddp.py",
        changes=_scaled("1024.0"),
    ),
    Twin(
        name="a GradScaler skips the step of a NaN, with AdamW",
        script="ddp.py",
        changes=(_ADAM, *_scaled("1024.0")),
    ),
    Twin(
        name="a GradScaler skips the step of a NaN that one rank's piece has",
        script="fsdp.py",
        changes=_IN_PIECES,
    ),
    Twin(
        name="a GradScaler whose scale is too large at first with one worker alone",
        script="ddp.py",
        changes=_scaled("2.0 ** 127 if dist.get_world_size() == 1 else 1.0"),
    ),
    Twin(
        name="all ranks skip the step of a NaN by themselves",
        script="ddp.py",
        changes=(_NO_ERROR, _skip()),
    ),
    Twin(
        name="all ranks skip the step of a NaN, which they reduced by hand",
        script="plain_loop.py",
        changes=(
            (
                "        if not parameter.grad.isfinite().all():\n"
                "            raise FloatingPointError("
                'f"the gradient of step {step} is not finite")\n',
                "    if not all(p.grad.isfinite().all() for p in model.parameters()):\n"
                "        continue\n",
            ),
        ),
    ),
)


def _hooked(hook: str) -> tuple[str, str]:
    """Return the change that registers the communication hook `hook` of torch."""
    return (
        "optimizer = torch.optim",
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        f"ddp.register_comm_hook(None, {hook})\noptimizer = torch.optim",
    )


def _approximated(result: str = "") -> tuple[str, str]:
    """Return the change that sends gradients with low rank, and does `result` to the sum."""
    return (
        "optimizer = torch.optim",
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as low_rank\n"
        "sent = low_rank.PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=1)\n"
        "def hook(state, bucket):\n"
        f"    return low_rank.powerSGD_hook(state, bucket){result}\n"
        "ddp.register_comm_hook(sent, hook)\noptimizer = torch.optim",
    )


_CUT = (
    (_LOOK.rstrip(), "torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)"),
    (
        "        optimizer.step()\n",
        "        assert all(p.grad.isfinite().all() for p in model.parameters())\n"
        "        optimizer.step()\n",
    ),
)

ROUNDED = (
    Twin(
        name="gradients are clipped element by element",
        script="ddp.py",
        changes=_CUT,
    ),
    Twin(
        name="gradients are clipped at a size that one element of the run exceeds",
        script="ddp.py",
        changes=((_CUT[0][0], _CUT[0][1].replace("0.1", "2.5")), _CUT[1]),
    ),
    Twin(
        name="gradients are sent in float16",
        script="ddp.py",
        changes=(_hooked("default_hooks.fp16_compress_hook"),),
    ),
    Twin(
        name="gradients are sent with low rank, after some steps",
        script="ddp.py",
        changes=(_approximated(),),
    ),
)

BUGS = (
    Twin(
        name="a mean that is sent with low rank is divided by workers once more",
        script="ddp.py",
        changes=(
            _approximated(".then(lambda sent: sent.value() / dist.get_world_size())"),
            ("parameters(), 1.0,", "parameters(), 100.0,"),
        ),
        check="parity",
        step=0,
        words="half as large",
    ),
    Twin(
        name="CLIP-VALUE-LOCAL: gradients are clipped element by element before they are reduced",
        script="ddp.py",
        changes=(
            _CUT[1],
            (f"        {_LOOK}", ""),
            (
                "obs = ent",
                "for p in model.parameters():\n"
                "    p.register_hook(lambda g: g.clamp(-0.1, 0.1))\nobs = ent",
            ),
        ),
        check="parity",
        step=0,
    ),
    Twin(
        name="a tensor is divided twice, and clipped element by element",
        script="ddp.py",
        changes=(_CUT[1], (_LOOK.rstrip(), "model[0].weight.grad /= 2\n        " + _CUT[0][1])),
        check="weighting",
        words="compared with the other tensors",
    ),
    Twin(
        name="NAN-SKIP-ONE: one rank alone skips the step of a NaN",
        script="ddp.py",
        changes=(_NO_ERROR, _skip(when="not norm.isfinite() and dist.get_rank() == 1")),
        check="finiteness",
        step=4,
        rank=1,
        words="rank 0 updated in step 4 after a non-finite value",
    ),
    Twin(
        name="NAN-SKIP-COUNTS: a skipped step counts in Adam's correction",
        script="ddp.py",
        changes=(
            _ADAM,
            _NO_ERROR,
            _skip("[state['step'].add_(1) for state in optimizer.state.values()]"),
        ),
        check="finiteness",
        step=4,
        rank=1,
        words="rank 0 updated in step 4 after a non-finite value",
    ),
    Twin(
        name="NAN-SKIP-MOMENTUM: a skipped step moves on by its momentum",
        script="ddp.py",
        changes=(
            _NO_ERROR,
            _skip("optimizer.zero_grad(set_to_none=False)", "optimizer.step()"),
        ),
        check="finiteness",
        step=4,
        rank=1,
        words="rank 0 updated in step 4 after a non-finite value",
    ),
    Twin(
        name="NAN-SWALLOWED: zero in the place of a NaN",
        script="ddp.py",
        changes=(
            (
                f"        {_LOOK}",
                "        for p in model.parameters():\n            p.grad.nan_to_num_(0.0)\n"
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            ),
        ),
        check="finiteness",
        step=4,
        rank=1,
        words="rank 0 updated in step 4 after a non-finite value",
    ),
)
