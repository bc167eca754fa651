"""Test whether the gradients of several ranks were added in the same order in two runs.

Up to rounding the sum is the same in any order, and with two ranks to the bit. With more, torch's
DistributedDataParallel adds otherwise in its first step, before it has arranged its buckets: so a
resumed run rightly has other bits than the straight one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.trace import Shard, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally

# Of the sum of the terms' norms: one rounding for each rank's term, and some for their division.
_ROUNDINGS = 2.0**-20


def comparable(tally: Tally, straight: Trace, trace: Trace) -> tuple[Trace, Trace]:
    """Return both runs without the steps from the first on that added in another order.

    If there is one, count it as missing.
    """
    if trace.scenario.world_size < 3:
        return straight, trace
    step = _first_apart(straight, trace)
    if step is None:
        return straight, trace
    tally.miss(
        f"step {step} has every rank's own gradient of the straight run, bit by bit, and another "
        "rounding of their sum: they were added in another order, as DistributedDataParallel does "
        "in its first step; to compare bits after a resume, run it on two workers (--world-size 2)"
    )
    return _before(straight, step), _before(trace, step)


def _first_apart(straight: Trace, trace: Trace) -> int | None:
    """Return the first step whose gradient differs by the rounding of its sum; None for none."""
    expected, shards = evidence.updates(straight), evidence.shards(straight)
    resumed_shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            continue
        for rank, update in by_rank.items():
            model = expected[step].get(rank)
            if model is None or _digests(model.gradient) == _digests(update.gradient):
                continue
            terms, others = shards.get(step, []), resumed_shards.get(step, [])
            same_terms = [_digests(s.gradient) for s in terms] == [
                _digests(s.gradient) for s in others
            ]
            known = bool(terms) and all(shard.gradient for shard in terms)
            if known and same_terms and _is_rounding(model.gradient, update.gradient, terms):
                return step
            return None
    return None


def _digests(tensors: Tensors) -> dict[str, str]:
    return {name: record.digest for name, record in tensors.items()}


def _is_rounding(expected: Tensors, got: Tensors, terms: list[Shard]) -> bool:
    """Return whether two gradients differ by no more than the rounding of a sum of `terms`."""
    due, now = evidence.vectors(expected), evidence.vectors(got)
    norms = [closeness.norm_l2(shard.gradient) for shard in terms]
    size = closeness.norm_l2(expected)
    if due is None or now is None or due.keys() != now.keys() or not size:
        return False
    whole = math.fsum(norm or math.inf for norm in norms)
    # The terms are divided as their sum is, by one number that is not known.
    total = np.sqrt(
        sum(np.square(_sum_of(terms, name)).sum() for name in due)  # float64
    )
    scale = whole * size / float(total) if total else math.inf
    gaps = (
        np.linalg.norm(now[name].astype(np.float64) - due[name].astype(np.float64)) for name in due
    )
    return all(float(gap) <= _ROUNDINGS * scale for gap in gaps)


def _sum_of(terms: list[Shard], name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = [shard.gradient[name].values() for shard in terms if name in shard.gradient]
    known = [value.astype(np.float64) for value in values if value is not None]
    return np.sum(known, axis=0) if known else np.zeros(1)


def _before(trace: Trace, step: int) -> Trace:
    kept = (
        event
        for event in trace.events
        if not (isinstance(event, Shard | Update) and event.step >= step)
    )
    return replace(trace, events=tuple(kept))
