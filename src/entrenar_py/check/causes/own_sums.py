"""Gradients that a script gets by itself, and adds up where no hook sees it. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import run_comparison
from entrenar_py.check.evidence import step_sums
from entrenar_py.shared.trace import Shard, Trace, Update


def seen_through(trace: Trace) -> Trace:
    """Return `trace` without `summed` in steps that applied the sum of all micro-batches.

    `summed` says which micro-batches the parameters' own gradients held. A script may add them to
    another buffer after each backward pass, clear them, and give the optimizer that buffer.

    Passes that add to no gradient count as parts of the micro-batches that come after them.
    """
    trace = _without_returned(trace)
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


def _without_returned(trace: Trace) -> Trace:
    """Return `trace` without passes of `torch.autograd.grad` whose result went to no gradient.

    An inner loop or a penalty computes with it. Such a pass has no loss, while the backward pass of
    the same step has one, which it is a part of.
    """
    updates, events, pending = evidence.updates(trace), [], dict[int, list[Shard]]()
    told = {(s.step, s.rank) for s in trace.of(Shard) if s.loss_sum is not None}
    for event in trace.events:
        if isinstance(event, Shard) and (event.step, event.rank) in told:
            by_rank = updates.get(event.step, {})
            if event.loss_sum is None and event.gradient and not step_sums.summed(by_rank, event):
                pending.setdefault(event.rank, []).append(event)
                continue
            event = _joined([*pending.pop(event.rank, ()), event])
        events.append(event)
    left = [shard for shards in pending.values() for shard in shards]
    return trace if left or len(events) == len(trace.events) else replace(trace, events=(*events,))


def _joined(shards: Sequence[Shard]) -> Shard:
    """Return the last of `shards` with the samples of all, each once, and their weight."""
    contents = [zip(s.ids, s.contents or [None] * len(s.ids), strict=False) for s in shards]
    by_id = dict(pair for one in contents for pair in one)
    known = tuple(content for content in by_id.values() if content is not None)
    last, weight = shards[-1], sum(shard.weight for shard in shards)
    loss = last.loss_sum and last.loss_sum * weight / (last.weight or 1.0)
    return replace(last, ids=tuple(by_id), contents=known, weight=weight, loss_sum=loss)


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
    if step_sums.shapes(total) != step_sums.shapes(mean):
        return False
    divisor = step_sums.divisor(total, mean)
    size = math.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in mean.values()))
    if divisor is None or not math.isfinite(size):
        return False
    return not step_sums.off(total, mean, divisor, bound * abs(divisor) * size)
