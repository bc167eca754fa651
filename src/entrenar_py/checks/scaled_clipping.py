"""Recognise gradients that were clipped while they were multiplied by the loss scale.

Their norm, once they are divided by the scale again, is the limit divided by the scale: the same
tiny number in each step, whatever the gradient. Judges nothing.
"""

from __future__ import annotations

import math

from entrenar_py.checks import closeness, evidence, skips
from entrenar_py.trace import Trace

_STEPS_MIN = 3  # equal norms in fewer steps may be chance
_POWERS = (16, *range(8, 16), *range(17, 25))  # of two: loss scales. GradScaler's is 2^16 at first
_ROUND = 1e-4  # of a limit that people write, in two digits; clip_grad_norm_ adds 1e-6 to a norm


def first(trace: Trace) -> tuple[int, str] | None:
    """Return the first step whose gradient was clipped while scaled, and words; None if none was.

    All steps with a gradient must show it: one limit, divided by powers of two.
    """
    rested = skips.without_gradients(trace)
    norms = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        norm = closeness.norm_l2(evidence.any_rank(by_rank).gradient)
        if step not in rested and norm:
            norms[step] = norm
    if len(norms) < _STEPS_MIN or not all(map(math.isfinite, norms.values())):
        return None
    (step, norm), *others = norms.items()
    limit = _limit(norm)
    if limit is None or not all(_is_power(norm / other) for _, other in others):
        return None
    scale = round(limit / norm)
    return step, (
        f"the norm of the applied gradient is {norm:.3g} in every step, such as {limit:g} divided "
        f"by {scale}, which could mean: clipped while still scaled"
    )


def _limit(norm: float) -> float | None:
    """Return the clipping limit that `norm` is after division by a usual loss scale; else None.

    A limit is from 0.1 to 10 and has one or two digits. A norm that is so round itself has none.
    """
    if _is_round(norm):
        return None
    limits = [limit for power in _POWERS if _is_round(limit := norm * 2.0**power)]
    likely = [float(f"{limit:.2g}") for limit in limits if 0.1 - _ROUND <= limit <= 10 + _ROUND]
    return next(iter(likely), None)


def _is_power(number: float) -> bool:
    """Return whether a number is a power of two: the scale changes by these."""
    return abs(number / 2.0 ** round(math.log2(number)) - 1) <= _ROUND


def _is_round(number: float) -> bool:
    return abs(float(f"{number:.2g}") - number) <= _ROUND * number
