"""Select the steps of two runs that can be compared.

These are steps with finite values, that mean the same step on every rank, and that come before
ranks are synchronised outside of the optimizer. NaN equals NaN in any trainer, and a training run
that produces NaN by itself is wrong, whatever was to be compared. Ranks with fewer batches than
others may leave an epoch earlier (torch's `Join`); then a step's number means different steps. And
local SGD synchronises weights outside the optimizer in many ways: all or some of them, at once or
step by step. Ranks that only lack a reduction drift apart, and nothing synchronises them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import rounds
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import (
    Event,
    Injected,
    Noticed,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Update,
)


def not_finite(compared: Compared) -> str:
    """Return from which step on neither run is finite, and what to change; "" if one always is."""
    step = _first(compared)
    if step is None:
        return ""
    names = dict.fromkeys(map(run_name, (compared.model, compared.trace)))
    return (
        f"in {' and '.join(names)} weights are not finite from step {step} on, so nothing can be "
        f"compared there: {_advice(compared.trace)}"
    )


def broken_by_itself(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a training run with weights that are no longer finite.

    Return None if something else may have caused it: a value was planted, the harness turned
    clipping off, or some weights were not finite before the first step (a mask that is a
    parameter).
    """
    runs = (compared.model, compared.trace)
    if any(map(_is_disturbed, runs)):
        return None
    trace = compared.trace
    step = min(update.step for update in trace.standing.of(Update) if not update.finite)
    by_rank = evidence.updates(trace)[step]
    update = next(update for update in by_rank.values() if not update.finite)
    tensor, element = evidence.non_finite(update.weights) or (None, None)
    return {
        "message": (
            f"weights are not finite from step {step} on{_origin(trace, step)}, and no such value "
            "was planted: stop there, and look for a division by 0, a logarithm or a root of 0, "
            "or a learning rate that is too high"
        ),
        "tensor": tensor,
        "element": element,
        **evidence.place(trace, update),
    }


def _is_disturbed(trace: Trace) -> bool:
    planted = any(
        str(event.fault.get("kind")).startswith("non_finite_") for event in trace.of(Injected)
    )
    begun = any(evidence.non_finite(start.weights) for start in trace.of(Start))
    return planted or begun or _began_so(trace) or trace.traits.clipping == "told"


def _origin(trace: Trace, step: int) -> str:
    """Return a phrase about the first micro-batch that was not finite; "" if all were."""
    bad = [one for one in trace.standing.of(Shard) if not one.finite and one.step <= step]
    if not bad:
        return ""
    first = min(bad, key=lambda shard: (shard.step, shard.rank, shard.shard))
    tensor, _ = evidence.non_finite(first.gradient) or ("", None)
    what = f"the gradient of {tensor}" if tensor else "the loss or gradient"
    return f", as {what} on rank {first.rank} in step {first.step} is"


def _began_so(trace: Trace) -> bool:
    return any({"nan", "inf"} & {*event.peculiar.values()} for event in trace.of(Noticed))


def _advice(trace: Trace) -> str:
    if _began_so(trace):
        return "they were not finite before the first step either, see F-DP-003"
    if trace.traits.clipping == "told":
        return (
            "nothing is clipped, since {clip} is 1e9 in every run except those that "
            "turn it; give the norm that you train with: [tool.entrenar-check.knobs] "
            'clip = {1e9 = "1.0"}'
        )
    return "check with a smaller learning rate, or fewer steps"


def while_finite(compared: Compared) -> Compared:
    """Return the comparison of the steps in which at least one run is finite."""
    step = _first(compared)
    if step is None:
        return compared
    return compared.both(lambda trace: until(trace, step))


def _first(compared: Compared) -> int | None:
    firsts = [_first_of(run) for run in (compared.model, compared.trace)]
    known = [first for first in firsts if first is not None]
    return max(known) if len(known) == len(firsts) else None


def _first_of(trace: Trace) -> int | None:
    steps = [update.step for update in trace.standing.of(Update) if not update.finite]
    return min(steps, default=None)


def until(trace: Trace, step: int) -> Trace:
    """Return `trace` without the events of `step` and of later steps."""
    return replace(trace, events=tuple(e for e in trace.events if not _is_of(e, step)))


def _is_of(event: Event, step: int) -> bool:
    if isinstance(event, Start):
        return event.step > step
    return isinstance(event, Shard | Update | Synchronised) and event.step >= step


# --- steps by their numbers -----------------------------------------------------------------------


def uneven(compared: Compared) -> str:
    """Return from which step on a number means different steps on ranks; "" if it never does."""
    for run in (compared.trace, compared.model):
        if (seen := _first_uneven(run)) is None:
            continue
        step, made = seen
        counts = ", ".join(f"rank {rank} {count}" for rank, count in sorted(made.items()))
        return (
            f"in {run_name(run)} ranks make different numbers of passes and steps ({counts}), so "
            f"from step {step} on a step number may mean a different step on each rank: for the "
            "check give all ranks the same number of batches, or let a rank without a batch make "
            "an empty pass, obs.samples([])"
        )
    return ""


def while_even(compared: Compared) -> Compared:
    """Return the comparison of the steps before the first number that may mean different steps."""
    firsts = [seen[0] for run in (compared.trace, compared.model) if (seen := _first_uneven(run))]
    if not firsts:
        return compared
    return compared.both(lambda trace: until(trace, min(firsts)))


def _first_uneven(trace: Trace) -> tuple[int, Counter[int]] | None:
    """Return the first step in which ranks are apart, and rank -> number of its steps; or None.

    Ranks are apart if one took fewer steps than another and also made fewer backward passes. (A
    rank that leaves out steps by an error still makes their passes.) If a fault cut the run short,
    ranks are apart if they are in different epochs in one step.
    """
    num_updates = Counter(update.rank for update in trace.of(Update))
    passes = Counter(shard.rank for shard in trace.of(Shard))
    is_whole = trace.end.status == "completed" and not trace.scenario.faults
    if trace.scenario.stops or (is_whole and not _is_uneven(num_updates, passes)):
        return None
    epochs: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> epoch
    for shard in trace.of(Shard):
        epochs[shard.step][shard.rank] = shard.epoch
    for step in sorted(epochs):
        is_absent = is_whole and len(epochs[step]) < len(num_updates)
        if is_absent or len({*epochs[step].values()}) > 1:
            return step, num_updates
    return None


def _is_uneven(made: Counter[int], passes: Counter[int]) -> bool:
    in_order = sorted(made, key=made.__getitem__)
    if not made or made[in_order[0]] == made[in_order[-1]]:
        return False
    return passes[in_order[0]] < passes[in_order[-1]]


# --- weights that are synchronised ----------------------------------------------------------------


NEARER = 0.95  # the largest fraction of two ranks' distance that a synchronisation may leave


def brought_together(compared: Compared) -> str:
    """Return where ranks that step alone are synchronised without reporting it; "" if nowhere."""
    for trace in (compared.trace, compared.model):
        if rounds.are_in(trace):
            continue
        if place := first_meeting(trace):
            step, name = place
            return (
                f"in {run_name(trace)} each rank steps with its own gradient, and before step "
                f"{step} something outside of the optimizer moves {name} closer to the other "
                "ranks' values: if workers are meant to step alone (local SGD, DiLoCo), call "
                "obs.synchronised(...) where they get the same weights, and check by "
                "local-sgd-v1.yaml; if not, reduce the gradients"
            )
    return ""


def before_steps(compared: Compared) -> Compared | None:
    """Return a run without its steps if its ranks are compared; None if two runs are compared.

    The weights before the first step remain.
    """
    return compared.both(lambda trace: until(trace, 0)) if compared.is_one_run else None


def first_meeting(trace: Trace) -> tuple[int, str] | None:
    """Return the first step before which ranks came closer in a tensor, and its name; or None."""
    before: Mapping[int, Update] = {}
    for step, by_rank in evidence.ranks_by_step(trace):
        ranks = sorted(before.keys() & by_rank.keys())
        for name in by_rank[ranks[0]].edited if len(ranks) > 1 else ():
            if not evidence.differ(name, [before[rank].gradient for rank in ranks]):
                continue
            then = _distance(name, [before[rank].weights for rank in ranks])
            now = _distance(name, [by_rank[rank].edited for rank in ranks])
            if then and now is not None and now < NEARER * then:
                return step, name
        before = by_rank
    return None


def _distance(name: str, held: Sequence[Tensors]) -> float | None:
    vectors = [tensors[name].vector() if name in tensors else None for tensors in held]
    known = [vector for vector in vectors if vector is not None]
    if len(known) < len(vectors) or len({vector.shape for vector in known}) > 1:
        return None
    first, *others = (vector.astype(np.float64) for vector in known)
    return max((float(np.linalg.norm(other - first)) for other in others), default=0.0)
