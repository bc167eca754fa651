"""What a script can be asked to do otherwise, though the training should stay the same.

Each knob is a placeholder in the command. It stands at its usual value in all runs but its own,
which are compared with the usual one (`checks.pairs` says how).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from entrenar_py.checks import evidence
from entrenar_py.errors import UsageError, did_you_mean
from entrenar_py.trace import Trace, Update

UNCLIPPED = "1e9"  # a norm that no gradient has
_CLIPPED_SHARE = 16  # the norm of the usual run's smallest gradient is so many times the limit
_CLIPPED_USUAL = 1e-3  # where that is not known


@dataclass(frozen=True, kw_only=True)
class Knob:
    """`says` what a script does with its value; `others` are what it is turned to."""

    says: str
    usual: str
    others: tuple[str, ...]


KNOBS: Mapping[str, Knob] = {
    "accumulation": Knob(
        says="micro-batches a step is made in, of the same global batch: 1, 2, 4",
        usual="1",
        others=("2", "4"),
    ),
    "clip": Knob(
        says=f"the largest L2 norm of a gradient: {UNCLIPPED}, and one that is always exceeded",
        usual=UNCLIPPED,
        others=(),  # depends on the gradients
    ),
    "loss_scale": Knob(
        says="what the loss is multiplied by before the backward pass: 1, 1024",
        usual="1",
        others=("1024",),
    ),
    "permute": Knob(
        says="1 where the samples of each global batch are to come in another order, else 0",
        usual="0",
        others=("1",),
    ),
    "strategy": Knob(
        says="off where the model is to be trained without its parallel strategy, else on",
        usual="on",
        others=("off",),
    ),
}


def turns(name: str, usual: Trace | None) -> tuple[str, ...]:
    """What `name` is turned to; for a clipping norm from the gradients of the usual run."""
    if name != "clip":
        return KNOBS[name].others
    assert usual is not None, "it was run first"
    return (_limit(usual),)


def beside(name: str, told: Collection[str]) -> tuple[tuple[str, str], ...]:
    """What else is turned with `name`, of the knobs in `told`: what is clipped at the wrong place,
    each micro-batch or a gradient that is still scaled, shows only where there is such a thing.
    """
    others = ("accumulation", "loss_scale") if name == "clip" else ()
    return tuple((one, KNOBS[one].others[0]) for one in others if one in told)


def require_spelled(spelled: Mapping[str, Mapping[str, str]], told: Collection[str]) -> None:
    """Returns if each knob and each value in `spelled` is one that turns; else UsageError.

    `told` are the knobs that the command has.
    """
    for name, values in spelled.items():
        if name not in KNOBS:
            raise UsageError.of("knobs", name, f"no knob; {did_you_mean(name, KNOBS)}")
        if name not in told:
            raise UsageError.of("knobs", name, f"the command has no {{{name}}}; say where it goes")
        known = (KNOBS[name].usual, *KNOBS[name].others)
        for value in values:
            if value not in known:
                raise UsageError(
                    f"knobs {name}={value!r}: it has no such value; it has {', '.join(known)}",
                    field="knobs",
                )


def _limit(usual: Trace) -> str:
    """A norm far below that of all gradients of a run, in a few digits."""
    norms = [evidence.norm_l2(update.gradient) for update in usual.of(Update)]
    known = [norm for norm in norms if norm and math.isfinite(norm)]
    return f"{min(known) / _CLIPPED_SHARE if known else _CLIPPED_USUAL:.2g}"
