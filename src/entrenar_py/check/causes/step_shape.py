"""Test whether an optimizer of an unknown rule moves weights in proportion to gradients.

SGD does. Adam and its like move an element whose gradient is rounding noise as far as any other, so
weights after their steps can't be compared within rounding. Judges nothing.
"""

from __future__ import annotations

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.shared.trace import Start, Tensors, Trace, Update

# The share of a move that gradient and weight may leave unexplained: rounding, but no sign of it.
_UNEXPLAINED = 1e-2


def is_adaptive(*runs: Trace) -> bool:
    """Return whether users' optimizers of an unknown rule move weights out of proportion.

    One run in which they are seen to move in proportion is enough: in others the gradients may not
    be reduced yet when they are recorded.
    """
    unknown = [run for run in runs if run.traits.rule != "known" and run.scenario.workload == "own"]
    return bool(unknown) and not any(map(_is_proportional, unknown))


def _is_proportional(trace: Trace) -> bool:
    """Return whether the first step moved each tensor by multiples of its gradient and weight."""
    start = next((start for start in trace.of(Start) if start.step == 0), None)
    first = evidence.updates(trace).get(0, {})
    if start is None or start.rank not in first:
        return False
    update = first[start.rank]
    shares = [_unexplained(name, start.weights, update) for name in update.gradient]
    known = [share for share in shares if share is not None]
    return bool(known) and max(known) <= _UNEXPLAINED


def _unexplained(name: str, before: Tensors, update: Update) -> float | None:
    """Return the share of a tensor's move that no multiples of its gradient and weight explain.

    None if values are unknown, or too few to tell.
    """
    held = (before.get(name), update.weights.get(name), update.gradient[name])
    values = [None if record is None else record.values() for record in held]
    known = [value.astype(np.float64) for value in values if value is not None]
    if len(known) < len(values) or known[0].size <= 2 or len({value.size for value in known}) > 1:
        return None
    weight, after, gradient = known
    moved = after - weight
    terms = np.stack([gradient, weight], axis=1)
    if not (np.isfinite(moved).all() and np.isfinite(terms).all() and moved.any()):
        return None
    factors = np.linalg.lstsq(terms, moved, rcond=None)[0]
    return float(np.linalg.norm(moved - terms @ factors) / np.linalg.norm(moved))
