"""Bugs that are the same on one worker and on two, so that only a knob of the script shows them.

`make twins` tests that the named check finds each one at its place.
"""

from __future__ import annotations

from falsification.user_trainers import Twin

_CLIPPING = (
    "        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip, "
    "error_if_nonfinite=True)\n"
)
_LOSS = "(given.loss_scale * loss * world_size / total).backward()"
_UNSCALING = "            parameter.grad /= given.loss_scale\n"
_STEP = "        optimizer.step()\n        optimizer.zero_grad()\n"
_BY_HAND = ('DistributedDataParallel(model) if given.ddp == "on" else None', "None")
_SCHEDULE = (
    "lr=0.05, momentum=0.9)\n",
    "lr=0.05, momentum=0.9)\n"
    "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)\n",
)

BUGS = (
    Twin(
        name="GA-MEAN: micro-batches of unequal weight are averaged as equals",
        script="knobs.py",
        source="transformers #34191",
        turned=("accumulation", "clip"),
        world_size=1,
        changes=((_LOSS, "(loss / weights.sum() / len(micro_batches)).backward()"),),
        check="parity",
        step=1,
        tensor="0.weight",
        words="with accumulation=2",
    ),
    Twin(
        name="GA-NOSCALE: micro-batches are added",
        script="knobs.py",
        source="nanoGPT 553f949f, trl #2615",
        turned=("accumulation", "clip"),
        world_size=1,
        changes=((_LOSS, "(loss / weights.sum()).backward()"),),
        check="parity",
        step=0,
        tensor="0.weight",
        words="with accumulation=2",
    ),
    Twin(
        name="GA-DROP: gradients are cleared before every micro-batch",
        script="knobs.py",
        source="DeepSpeed #6550, #7967",
        turned=("accumulation",),
        world_size=1,
        changes=(
            ("            last = ", "            optimizer.zero_grad()\n            last = "),
        ),
        check="parity",
        step=0,
        tensor="0.weight",
        words="with accumulation=2",
    ),
    Twin(
        name="GA-STEP-EACH: the optimizer steps after every micro-batch",
        script="knobs.py",
        source="accelerate #2790",
        turned=("accumulation",),
        world_size=1,
        changes=(
            (_LOSS, _LOSS + "\n            optimizer.step()\n            optimizer.zero_grad()"),
            (_CLIPPING + _STEP, ""),
            (_UNSCALING, "            pass\n"),
        ),
        check="parity",
        step=0,
        words="the optimizer steps after every micro-batch",
    ),
    Twin(
        name="HOOK-PREACC: the first micro-batch is synchronised instead of the last",
        script="knobs.py",
        source="picotron d0efdcc",
        turned=("accumulation",),
        changes=(("last = number == len(micro_batches)", "last = number == 1"),),
        check="replica_identity",
        step=0,
        rank=1,
        tensor="0.weight",
    ),
    Twin(
        name="LR-TIMES-GA: the schedule moves with every micro-batch",
        script="knobs.py",
        source="accelerate #999",
        turned=("accumulation",),
        world_size=1,
        changes=(_SCHEDULE, (_LOSS, _LOSS + "\n                schedule.step()")),
        check="parity",
        step=0,
        words="it is that of step 1",
    ),
    Twin(
        name="a scaled loss is not unscaled",
        script="knobs.py",
        source="classic (loss scale)",
        turned=("clip", "loss_scale"),
        world_size=1,
        changes=((_UNSCALING, "            pass\n"),),
        check="parity",
        step=0,
        tensor="0.weight",
        words="with loss_scale=1024",
    ),
    Twin(
        name="clipped before unscaling",
        script="knobs.py",
        source="classic (loss scale)",
        turned=("clip", "loss_scale"),
        world_size=1,
        changes=(
            (_CLIPPING, ""),
            ("        for parameter in", _CLIPPING + "        for parameter in"),
        ),
        check="parity",
        step=0,
        words="loss_scale=1024",
    ),
    Twin(
        name="clipped in every micro-batch",
        script="knobs.py",
        source="classic",
        turned=("accumulation", "clip"),
        world_size=1,
        changes=(
            (_CLIPPING, ""),
            (_LOSS, _LOSS + "\n        " + _CLIPPING.rstrip("\n")),
        ),
        check="parity",
        step=0,
        words="accumulation=2",
    ),
    Twin(
        name="CLIP-BEFORE: each rank clips its own gradient",
        script="knobs.py",
        source="Horovod torch optimizer: synchronize() must come first",
        turned=("clip",),
        changes=(
            _BY_HAND,
            (_CLIPPING, ""),
            ("        for parameter in", _CLIPPING + "        for parameter in"),
        ),
        check="parity",
        step=0,
        tensor="0.weight",
        words="clipped to this norm",
    ),
    Twin(
        name="CLIP-COUNT: the norm counts a tensor twice",
        script="knobs.py",
        source="pytorch #88955",
        turned=("clip",),
        world_size=1,
        changes=(
            (
                _CLIPPING,
                _CLIPPING.replace("model.parameters()", "[*model.parameters(), model[0].weight]"),
            ),
        ),
        check="step_rule",
        step=0,
        words="clipped to this norm",
    ),
    Twin(
        name="CLIP-COUNT: the norm leaves a tensor out",
        script="knobs.py",
        source="Megatron-LM #5916",
        turned=("clip",),
        world_size=1,
        changes=((_CLIPPING, _CLIPPING.replace("model.parameters()", "model[0].parameters()")),),
        check="step_rule",
        step=0,
    ),
    Twin(
        name="each tensor is clipped by its own norm",
        script="knobs.py",
        source="classic",
        turned=("clip",),
        world_size=1,
        changes=(
            (
                _CLIPPING,
                "        for one in model.parameters():\n            "
                "torch.nn.utils.clip_grad_norm_(one, given.clip, error_if_nonfinite=True)\n",
            ),
        ),
        check="step_rule",
        step=0,
    ),
    Twin(
        name="clipped by value and not by norm",
        script="knobs.py",
        source="classic",
        turned=("clip",),
        world_size=1,
        changes=(("clip_grad_norm_", "clip_grad_value_"), (", error_if_nonfinite=True", "")),
        check="step_rule",
        step=0,
    ),
    Twin(
        name="the clipping norm is not looked at",
        script="knobs.py",
        source="classic (a flag that nothing reads)",
        turned=("clip",),
        world_size=1,
        changes=(("given.clip, error", "1e9, error"),),
        check="parity",
        step=0,
        words="the norm of the applied gradient is larger than the limit",
    ),
    Twin(
        name="clipped though nothing is to be",
        script="knobs.py",
        source="classic",
        turned=("clip",),
        world_size=1,
        changes=(("given.clip, error", "min(given.clip, 0.5), error"),),
        check="weighting",
        words="divided by another number",
    ),
    Twin(
        name="the last sample of a batch does not count",
        script="knobs.py",
        source="classic (off by one)",
        turned=("permute",),
        world_size=1,
        changes=(("errors.square().squeeze(1)).sum()", "errors.square().squeeze(1))[:-1].sum()"),),
        check="parity",
        step=0,
        words="with permute=1",
    ),
    Twin(
        name="weights are not moved with their samples",
        script="knobs.py",
        source="classic",
        turned=("permute",),
        world_size=1,
        changes=(
            ("one.flip(0) for one in batch]", "one.flip(0) for one in batch[:3]] + batch[3:]"),
        ),
        check="parity",
        step=0,
        words="with permute=1",
    ),
    Twin(
        name="EP-SCALE: the strategy has a factor of its own, with any number of workers",
        script="knobs.py",
        source="DeepSpeed #5618, torchtitan #1551",
        turned=("clip", "strategy"),
        world_size=1,
        changes=((_LOSS, "(loss * world_size / total / (2 if ddp else 1)).backward()"),),
        check="parity",
        step=0,
        words="with strategy=off",
    ),
    Twin(
        name="TP-PARTIAL: the strategy loses the gradient of one tensor",
        script="knobs.py",
        source="torchtitan #4054, Megatron-LM 5fffdfc737",
        turned=("clip", "strategy"),
        world_size=1,
        changes=(
            (
                "            parameter.grad /= given.loss_scale\n",
                "            parameter.grad /= given.loss_scale\n"
                "        if ddp is not None:\n            model[0].bias.grad.zero_()\n",
            ),
        ),
        check="parity",
        step=0,
        tensor="0.bias",
        words="with strategy=off",
    ),
)
