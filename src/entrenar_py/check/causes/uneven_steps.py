"""Test whether a step's number means the same step on every rank.

Ranks that have fewer batches than others may leave an epoch before these do (torch's `Join`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from entrenar_py.check.causes import divergence
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Shard, Trace, Update


def lacking(compared: Compared) -> str:
    """Return from which step on numbers may mean other steps on some ranks; "" if they don't."""
    for run in (compared.trace, compared.model):
        if (seen := _apart(run)) is None:
            continue
        step, made = seen
        told = ", ".join(f"rank {rank} {count}" for rank, count in sorted(made.items()))
        return (
            f"in {run_name(run)} ranks make different numbers of passes and steps ({told}), so "
            f"from step {step} on a number may mean different steps: give all ranks as many "
            "batches for the check, or let those that have none make empty passes, with "
            "obs.samples([])"
        )
    return ""


def before(compared: Compared) -> Compared:
    """Return the comparison without the steps whose numbers may mean different steps."""
    firsts = [seen[0] for run in (compared.trace, compared.model) if (seen := _apart(run))]
    if not firsts:
        return compared
    trace = divergence.until(compared.trace, min(firsts))
    model = trace if compared.is_one_run else divergence.until(compared.model, min(firsts))
    return replace(compared, model=model, trace=trace)


def _apart(trace: Trace) -> tuple[int, Counter[int]] | None:
    """Return the first step in which ranks are apart, and how many steps each made; else None.

    They are if one made fewer steps than another, and fewer backward passes. A rank that leaves
    out steps by an error makes their passes. A run that a fault has cut short shows it by ranks
    that are in different epochs in one step.
    """
    made = Counter(update.rank for update in trace.of(Update))
    passes = Counter(shard.rank for shard in trace.of(Shard))
    is_whole = trace.end.status == "completed" and not trace.scenario.faults
    if trace.scenario.stops or (is_whole and not _is_uneven(made, passes)):
        return None
    epochs: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> epoch
    for shard in trace.of(Shard):
        epochs[shard.step][shard.rank] = shard.epoch
    for step in sorted(epochs):
        is_absent = is_whole and len(epochs[step]) < len(made)
        if is_absent or len({*epochs[step].values()}) > 1:
            return step, made
    return None


def _is_uneven(made: Counter[int], passes: Counter[int]) -> bool:
    """Return whether the rank with the fewest steps also has fewer passes than that with most."""
    in_order = sorted(made, key=made.__getitem__)
    if not made or made[in_order[0]] == made[in_order[-1]]:
        return False
    return passes[in_order[0]] < passes[in_order[-1]]
