"""How far rounding alone moves a user's training, measured on a run with nudged weights.

Two right runs on other numbers of workers add the same gradients in another order, so they differ
by some roundings. A static bound allows for these, but not for what a training makes of them. Where
a ReLU, a maximum or a router is near its kink, one rounding changes a whole term of a gradient. A
learning rate that is far too high doubles every difference in every step.

So where two runs differ by little, a third shows what rounding does: the run on one worker, with
its first weights nudged by some roundings (`Fault` of kind `nudged_weights`). How far it is from
the run that was not nudged is the sensitivity, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, precision
from entrenar_py.check.evidence.needs import NUDGED, Runs
from entrenar_py.shared.trace import Trace, Update

# Roundings by which each weight is nudged. Two orders of adding differ by a few roundings at each
# kink. More of them meet a kink wherever those few may: a single one decides by chance. In 16 bits
# each operation rounds by so much that one is like the runs' own.
_ROUNDINGS = 256
_ROUNDINGS_OF_16_BITS = 1
# Two runs may be this much further apart than the nudged one.
MARGIN = 4.0
# A relative distance of a nudged run above which nothing is left to compare.
CHAOTIC = 0.1


@dataclass(frozen=True)
class Sensitivity:
    """The relative distances of a nudged run from the same one without that: by part, then by step.

    Each is the largest of all tensors. Parts are `loss`, `gradient`, `weights` and `buffers`. All
    is empty if no run was nudged.
    """

    moved: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def allowed(self, part: str, step: int, bound: float) -> float:
        """Return the allowed relative distance of two runs in `part` of `step`: at least `bound`.

        Steps that the nudged run did not make are like the last one that it made.
        """
        return max(bound, MARGIN * self._until(part, step))

    def is_chaotic(self, step: int) -> bool:
        """Return whether rounding alone can make two gradients of `step` unlike."""
        return self._until("gradient", step) > CHAOTIC

    def in_words(self, num_steps: int, bound: float) -> str:
        """Return how far rounding moves the first steps, if by more than `bound`; else ""."""
        for step in range(num_steps):
            if self.is_chaotic(step):
                return (
                    f"rounding alone moves the gradients of step {step} by "
                    f"{self._until('gradient', step):.0%}, as a run with nudged weights shows: not "
                    "compared from there on; a smaller learning rate makes steps comparable"
                )
        widest = self.allowed("gradient", num_steps - 1, bound)
        if widest <= bound:
            return ""
        return (
            f"rounding alone moves the gradients of the first {num_steps} steps by up to "
            f"{widest / MARGIN:.1g} of their norm, as a run with nudged weights shows: compared "
            f"within {widest:.1g}"
        )

    def _until(self, part: str, step: int) -> float:
        distances = self.moved.get(part, {})
        return max((size for made, size in distances.items() if made <= step), default=0.0)


UNKNOWN = Sensitivity()


def of(runs: Runs[Trace]) -> Sensitivity:
    """Return the sensitivity that the witnesses in `runs` show; UNKNOWN if none was nudged."""
    pair = runs.witnesses.get(NUDGED, ())
    return _measured(*pair) if len(pair) == 2 else UNKNOWN


def nudge(trace: Trace) -> float:
    """Return by what share of itself to nudge each weight of a training like that of `trace`."""
    unit = precision.unit(trace)
    return unit * (_ROUNDINGS if unit <= precision.FLOAT32 else _ROUNDINGS_OF_16_BITS)


def may_be_rounding(model: Trace, trace: Trace) -> bool:
    """Return whether two runs that differ are near enough to each other for rounding to be why.

    They are if their first gradients are.
    """
    moved = _measured(model, trace)
    step = min(moved.moved["gradient"], default=None)
    return step is not None and not moved.is_chaotic(step)


def _measured(model: Trace, trace: Trace) -> Sensitivity:
    moved: dict[str, dict[int, float]] = {
        part: {} for part in ("loss", "gradient", "weights", "buffers")
    }
    expected = evidence.updates(evidence.with_losses(model))
    got = evidence.updates(evidence.with_losses(trace))
    for step in sorted(expected.keys() & got.keys()):
        first, second = evidence.any_rank(expected[step]), evidence.any_rank(got[step])
        for part, sizes in moved.items():
            distance = _loss_apart(first, second) if part == "loss" else _apart(part, first, second)
            sizes[step] = distance
    return Sensitivity(moved)


def _loss_apart(first: Update, second: Update) -> float:
    if first.loss is None or second.loss is None or not first.loss:
        return 0.0
    return abs(second.loss - first.loss) / abs(first.loss)


def _apart(part: str, first: Update, second: Update) -> float:
    """Return the largest relative distance of two tensors of a name."""
    gaps = closeness.distances(getattr(first, part), getattr(second, part)) or {}
    sizes = (gap.relative for gap in gaps.values())
    return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)
