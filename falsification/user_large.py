"""Bugs and correct scripts in a model above 65,536 parameters, of which only sketches are recorded.

`make twins` runs all of them.
"""

from __future__ import annotations

from dataclasses import replace

from falsification import user_benign, user_bugs, user_knobs, user_scalers, user_trainers
from falsification.user_trainers import Twin

_SMALL = "torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)"
_LARGE = "torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8200, bias=False), \
torch.nn.Tanh(), torch.nn.Linear(8200, 1)"
_NAMES = (
    "a mean over ranks of unequal shares",
    "the sum over ranks is not divided",
    "the wrapper is bypassed, so nothing is synchronised",
    "each rank starts from weights of its own",
    "the schedule moves once for every worker",
    "a resume without the optimizer's moments",
    "OPT-STALE: the optimizer holds copies of the parameters",
    "BUFFER-ALIAS: gradients are never cleared",
    "MASTER-HALF: weights in bfloat16, and steps below half of their last bit",
    "a step with the gradient of the step before",
    "SDC-FLIP: a bit of a weight of one rank",
    "a scaled loss is not unscaled",
    "clipped in every micro-batch",
    "CLIP-BEFORE: each rank clips its own gradient",
    "AdamW on weights in bfloat16",
    "gradients are clipped element by element",
)


def _enlarged(twin: Twin) -> Twin:
    """Return a twin with a larger model in the same script."""
    return replace(
        twin, name=f"{twin.name}, in a large model", changes=(*twin.changes, (_SMALL, _LARGE))
    )


_EVERY = (
    *(*user_trainers.TWINS, *user_bugs.BUGS, *user_knobs.BUGS, *user_benign.VARIANTS),
    *user_scalers.VARIANTS,
)
TWINS = (
    *(_enlarged(twin) for twin in _EVERY if twin.name in _NAMES),
    *(
        replace(_enlarged(twin), verdict="inconclusive", words="which nobody declared")
        for twin in user_bugs.BUGS
        if twin.name == "reduced in bfloat16"  # elements show it, and sketches have few
    ),
    Twin(
        name="one row of one tensor is not reduced, in a large model",
        script="plain_loop.py",
        changes=(
            (
                "dist.all_reduce(parameter.grad)",
                "kept = parameter.grad[:1].clone()\n        dist.all_reduce(parameter.grad)\n"
                "        if parameter.grad.shape == (8200, 8):\n"
                "            parameter.grad[:1] = kept",
            ),
            (_SMALL, _LARGE),
        ),
        check="parity",
        step=1,
        tensor="2.weight",
    ),
    Twin(name="as it is, in a large model", script="fsdp.py", changes=((_SMALL, _LARGE),)),
    Twin(name="as it is, in a large model", script="accumulation.py", changes=((_SMALL, _LARGE),)),
)
