"""Gradients that a script adds up by itself, in memory that no hook sees. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.checks import evidence, gradient_sums, run_comparison, step_sums
from entrenar_py.trace import Shard, Trace, Update


def seen_through(trace: Trace) -> Trace:
    """Return `trace` without `summed` in steps that applied the sum of all micro-batches.

    `summed` says which micro-batches the parameters' own gradients held. A script may add them to
    another buffer after each backward pass, clear them, and give the optimizer that buffer.
    """
    shards = evidence.shards(trace)
    bound = run_comparison.Bounds.of({}, trace).gradient
    all_held = {
        step
        for step, by_rank in evidence.updates(trace).items()
        if any(update.summed for update in by_rank.values())
        and applies_all(by_rank, shards.get(step, ()), bound)
    }
    if not all_held:
        return trace
    events = (
        replace(event, summed={}) if isinstance(event, Update) and event.step in all_held else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))


def are_applied(trace: Trace, steps: Collection[int]) -> bool:
    """Return whether in all of `steps` the sum of all micro-batches' gradients was applied."""
    updates, shards = evidence.updates(trace), evidence.shards(trace)
    bound = run_comparison.Bounds.of({}, trace).gradient
    return all(
        step in updates and applies_all(updates[step], shards.get(step, ()), bound)
        for step in steps
    )


def applies_all(by_rank: Mapping[int, Update], shards: Sequence[Shard], bound: float) -> bool:
    """Return whether the applied gradient is the sum of all shards', divided by one number."""
    everything = {rank: replace(update, summed={}) for rank, update in by_rank.items()}
    total = step_sums.total(everything, shards)
    mean = evidence.vectors(evidence.any_rank(by_rank).gradient)
    if total is None or mean is None:
        return False
    if gradient_sums.shapes(total) != gradient_sums.shapes(mean):
        return False
    divisor = gradient_sums.divisor(total, mean)
    size = math.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in mean.values()))
    if divisor is None or not math.isfinite(size):
        return False
    return not gradient_sums.off(total, mean, divisor, bound * abs(divisor) * size)
