"""Recognise ranks that step tensors by their own samples' gradients alone, and pass them on.

An optimizer that shards its state (ZeRO) moves each tensor on one rank, its owner, and sends the
weights to the others. So ranks agree even if nobody has reduced the gradients, and each tensor is
trained by the samples of its owner. A rank to which gradients were reduced has another gradient
than its own samples give, and an optimizer that reduces them itself moves weights otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import update_rule
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence import step_sums
from entrenar_py.shared.trace import Shard, Trace, Update

_STEPS_MIN = 2  # Adam's first moves are +-rate, whatever the gradient is
_ALIKE = 1e-4  # relative, L2: roundings of a sum, and of clipping


def broken(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a run that trains a tensor by one rank's samples; or None."""
    for trace in (compared.trace, compared.model):
        steps = [*evidence.ranks_by_step(trace)]
        if len(steps) < _STEPS_MIN or len(steps[0][1]) < 2:
            continue
        owners = _owners(trace, steps)
        if owners and _have_own_gradients(trace, steps, owners):
            name = min(owners)
            return _words(name, owners[name]) | evidence.place(trace, steps[0][1][owners[name]])
    return None


def _words(name: str, rank: int) -> dict[str, Any]:
    return {
        "message": f"all ranks move {name} by the gradient of rank {rank}'s own samples, and not "
        "by the mean of all ranks': gradients are never reduced, and weights are sent around; call "
        "the model that reduces them (not model.module), or reduce them before the step",
        "tensor": name,
        "expected": "the mean of all ranks' gradients",
        "got": f"that of rank {rank}",
    }


def _owners(trace: Trace, steps: list[tuple[int, Mapping[int, Update]]]) -> dict[str, int]:
    """Return the one rank by whose gradient all ranks move a tensor, in every step.

    Return {} unless it is so of all tensors with gradients.
    """
    names = {name for _, by_rank in steps for u in by_rank.values() for name in u.gradient}
    if not all(_are_apart(name, by_rank) for _, by_rank in steps for name in names):
        return {}
    followed = _followed(trace)
    of_all = {name: followed.get(name, set()) for name in names}
    if any(len(ranks) != 1 for ranks in of_all.values()):
        return {}
    return {name: min(ranks) for name, ranks in of_all.items()}


def _are_apart(name: str, by_rank: Mapping[int, Update]) -> bool:
    """Return whether ranks hand over unlike gradients of a tensor, and hold it alike after."""
    updates = by_rank.values()
    if not all(name in u.gradient and name in u.weights for u in updates):
        return False
    unlike = len({u.gradient[name].digest for u in updates}) == len(by_rank)
    return unlike and len({u.weights[name].digest for u in updates}) == 1


def _followed(trace: Trace) -> dict[str, set[int]]:
    """Return the ranks whose gradients move a tensor by the optimizer's rule, in all steps."""
    rules: dict[int, update_rule.Rule] = {}
    follows: dict[str, dict[int, bool]] = {}
    for event in trace.standing.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        if event.rank not in rules:
            continue
        rounding = update_rule.rounding(trace, event)
        expected = dict(rules[event.rank].step(event))
        for name in event.gradient:
            is_so = name in expected and _is_at(event, name, expected[name], rounding)
            of_rank = follows.setdefault(name, {})
            of_rank[event.rank] = of_rank.get(event.rank, True) and is_so
    return {name: {rank for rank, is_so in of.items() if is_so} for name, of in follows.items()}


def _is_at(update: Update, name: str, expected: update_rule.Expected, rounding: float) -> bool:
    after = update.weights[name].elements() if name in update.weights else None
    if after is None or after.shape != expected.weight.shape:
        return False
    gap = np.abs(after - expected.weight)
    return bool((gap <= update_rule.allowed(rounding, expected)).all())


def _have_own_gradients(
    trace: Trace, steps: list[tuple[int, Mapping[int, Update]]], owners: Mapping[str, int]
) -> bool:
    """Return whether owners' gradients are those of their own samples, which no other rank has."""
    shards = evidence.shards(trace)
    return all(
        step_sums.are_apart(shards.get(step, ()))
        and all(
            _is_own(
                by_rank[rank],
                [one for one in shards[step] if one.rank == rank],
                {name for name, owner in owners.items() if owner == rank},
            )
            for rank in {*owners.values()}
        )
        for step, by_rank in steps
    )


def _is_own(update: Update, shards: Collection[Shard], names: Collection[str]) -> bool:
    """Return whether the gradient is a multiple of the sum of the rank's own micro-batches'."""
    total, applied = (
        step_sums.total({update.rank: update}, shards),
        evidence.vectors(update.gradient),
    )
    if not shards or not total or applied is None or not {*names} <= total.keys():
        return False
    own, got = (step_sums.joined(vectors, names) for vectors in (total, applied))
    if own.shape != got.shape or not own.any():
        return False
    number = step_sums.divisor({"": own}, {"": got})
    return number is not None and bool(
        np.linalg.norm(own - number * got) <= _ALIKE * np.linalg.norm(own)
    )
