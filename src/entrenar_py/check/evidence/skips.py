"""Find the steps that a trainer skipped on all ranks, as a `GradScaler` does. Judges nothing.

Only a user's own trainer can skip steps: the harness's trainers halt at a non-finite value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from entrenar_py.check.evidence import evidence
from entrenar_py.shared.trace import Start, Tensors, Trace, Update
from entrenar_py.shared.wording import named


def skipped(trace: Trace) -> set[int]:
    """Return the finite steps in which no rank changed its weights or its optimizer state."""
    if trace.scenario.workload != "own":
        return set()
    state_of: dict[int, tuple[Tensors, Tensors]] = {}
    rested: dict[tuple[int, int], bool] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            state_of[event.rank] = event.weights, event.optimizer
        elif isinstance(event, Update):
            now = event.weights, event.optimizer
            before = state_of.get(event.rank)
            rests = before is not None and _same(before, now)
            rested[event.step, event.rank] = rests and event.finite  # any step leaves a NaN a NaN
            state_of[event.rank] = now
    ranks = {rank for _, rank in rested}
    steps = {step for step, _ in rested}
    return {step for step in steps if all(rested.get((step, rank)) for rank in ranks)}


def without_gradients(trace: Trace) -> set[int]:
    """Return the skipped steps in which no rank recorded a gradient."""
    updates = evidence.updates(trace)
    return {
        step
        for step in skipped(trace)
        if not any(update.gradient for update in updates[step].values())
    }


def told(steps: Iterable[int]) -> str:
    """Return such words as `skipped steps 4, 5 on all ranks`."""
    return f"{named('skipped step', steps, most=5)} on all ranks"


def _same(before: tuple[Tensors, Tensors], now: tuple[Tensors, Tensors]) -> bool:
    """Return whether both states have the same digests; False if no weights were recorded."""
    return bool(now[0]) and [*map(_digests, before)] == [*map(_digests, now)]


def _digests(tensors: Tensors) -> Mapping[str, str]:
    return {name: record.digest for name, record in tensors.items()}
