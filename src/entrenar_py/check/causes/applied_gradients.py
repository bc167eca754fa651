"""Test whether the recorded gradients are those that moved the weights.

They are read as a step begins. Some optimizers reduce them inside of the step, or step copies of
the weights (in float32, or of other shapes) that are written back later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.causes import brought_together
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence import missing, rounds
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Event, Injected, Shard, Start, Tensors, Trace, Update


def unreduced(compared: Compared) -> str:
    """Return why a run's gradients were not reduced when the optimizer got them; "" if they were.

    They differ between ranks then, and yet all ranks move a tensor to the same values.
    """
    for trace in (compared.trace, compared.model):
        if rounds.are_in(trace) or brought_together.first(trace):
            continue  # each worker steps with its own gradient, and Adam's first moves are alike
        if place := _reduced_later(trace):
            step, name = place
            return (
                f"in {run_name(trace)} ranks hand different gradients of {name} to the optimizer "
                f"in step {step}, and move it alike: it reduces them itself; call obs.reduced() "
                "where they are reduced, before they are clipped"
            )
    return ""


def reduces_later(trace: Trace) -> bool:
    """Return whether ranks give an optimizer different gradients, and it moves them alike."""
    alone = rounds.are_in(trace) or brought_together.first(trace)
    return not alone and _reduced_later(trace) is not None


def _reduced_later(trace: Trace) -> tuple[int, str] | None:
    """Return the first step and tensor of which ranks had different gradients and equal moves.

    A tensor of one number may move alike by chance: Adam's first moves are +-rate. It counts if no
    other moved apart.
    """
    before: Mapping[int, Tensors] = {
        start.rank: start.weights for start in reversed(trace.of(Start)) if start.step == 0
    }
    for step, by_rank in evidence.ranks_by_step(trace):
        gradients = evidence.any_rank(by_rank).gradient
        apart = [
            name
            for name in gradients
            if _num_values(name, [update.gradient for update in by_rank.values()]) > 1
        ]
        alike = [
            name
            for name in apart
            if _num_values(name, [update.weights for update in by_rank.values()]) == 1
            and _has_moved(name, before, by_rank)
        ]
        sure = alike if alike == apart else [name for name in alike if gradients[name].size != 1]
        if sure:
            return step, sure[0]
        before = {rank: update.weights for rank, update in by_rank.items()}
    return None


def _num_values(name: str, held: list[Tensors]) -> int:
    """Return how many different values of a tensor there are; 0 if one lacks it."""
    if not all(name in tensors for tensors in held):
        return 0
    return len({tensors[name].digest for tensors in held})


def _has_moved(name: str, before: Mapping[int, Tensors], by_rank: Mapping[int, Update]) -> bool:
    """Return whether every rank changed a tensor to the values after the step."""
    return all(
        rank in before
        and name in before[rank]
        and before[rank][name].digest != update.weights[name].digest
        for rank, update in by_rank.items()
    )


def without_gradients(compared: Compared) -> Compared:
    """Return the comparison without gradients: losses, weights and learning rates are left."""
    trace = _bare(compared.trace)
    return replace(
        compared, trace=trace, model=trace if compared.is_one_run else _bare(compared.model)
    )


def _bare(trace: Trace) -> Trace:
    return replace(trace, events=tuple(map(_event_without, trace.events)))


def _event_without(event: Event) -> Event:
    if isinstance(event, Update):
        return replace(event, gradient={}, grad_norm=None, applied_norm=None)
    return replace(event, gradient={}) if isinstance(event, Shard) else event


def skipped_unseen(compared: Compared) -> str:
    """Return why ranks may have skipped a step without a sign of it; "" if they haven't.

    The ranks with a value that is not finite skipped it. Others, whose own values are finite, seem
    to make it with more micro-batches than the step before, and all weights stay finite: an
    optimizer that reduces gradients by itself dropped theirs, and the next step's came on top.
    """
    trace = compared.trace
    made = evidence.updates(trace)
    counts = Counter((shard.step, shard.rank) for shard in trace.of(Shard))
    struck: dict[int, set[int]] = {}
    planted = (one for one in trace.of(Injected) if one.fault["kind"].startswith("non_finite_"))
    places = [(one.step or 0, one.rank or 0) for one in planted]
    places += [(shard.step, shard.rank) for shard in trace.of(Shard) if not shard.finite]
    for step, rank in places:
        struck.setdefault(step, set()).add(rank)
    if not all(update.finite for update in trace.of(Update)):
        return ""
    for step, ranks in sorted(struck.items()):
        others = made.get(step, {}).keys() - ranks
        if others and all(counts[step, rank] > counts[step - 1, rank] > 0 for rank in others):
            return (
                f"{missing.named(ranks)} skipped step {step} for a value that is not finite, and "
                f"{missing.named(others)} may have dropped finite gradients there: call "
                "obs.skipped() on every rank where the script, or its optimizer, skips a step"
            )
    return ""


def copies_stepped(compared: Compared) -> str:
    """Return why an update can't be recomputed if the optimizer holds copies of the weights."""
    if compared.trace.traits.steps == "model":
        return ""
    return (
        "the optimizer steps copies of the model's weights (masters in float32, or shards), which "
        "are written back later: its updates can't be recomputed from the model's own"
    )
