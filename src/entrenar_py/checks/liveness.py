"""F-TI-004: every trainable tensor moves, every frozen one does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.trace import Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Tally

# A trainable tensor may rest while its gradient is exactly zero (LoRA's A while B is still zero);
# after this many steps with a positive learning rate it must have moved.
STEPS_TO_MOVE = 3


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Trainable and frozen as the trainer declared them at its start."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        starts = {start.rank: start for start in reversed(trace.of(Start))}
        by_rank: dict[int, list[Update]] = {rank: [] for rank in starts}
        for update in trace.of(Update):
            by_rank.setdefault(update.rank, []).append(update)
        for rank, start in sorted(starts.items()):
            _frozen(tally, trace, start, by_rank[rank])
            _moving(tally, trace, start, by_rank[rank])
    return tally.finding(nothing="no run declared its trainable tensors and made three steps")


def _frozen(tally: Tally, trace: Trace, start: Start, updates: Sequence[Update]) -> None:
    scenario = trace.scenario.to_dict()
    for update in updates:
        before = {name: start.weights[name] for name in start.frozen if name in start.weights}
        after = {name: update.weights[name] for name in before if name in update.weights}
        place = {"step": update.step, "rank": update.rank, "scenario": scenario}
        evidence.compare_exact(tally, before, after, "a frozen tensor changed", **place)


def _moving(tally: Tally, trace: Trace, start: Start, updates: Sequence[Update]) -> None:
    live = [update for update in updates if update.learning_rate > 0]
    if len(live) < STEPS_TO_MOVE:
        return
    for name in start.trainable:
        seen = [start.weights, *(update.weights for update in live)]
        moved = [_differ(before, after, name) for before, after in pairwise(seen)]
        last = live[STEPS_TO_MOVE - 1]
        tally.check(
            any(moved[:STEPS_TO_MOVE]),
            f"trainable tensor {name} did not move in {STEPS_TO_MOVE} steps",
            step=last.step,
            rank=start.rank,
            tensor=name,
            expected="a change",
            got=_digest(last.weights, name),
            scenario=trace.scenario.to_dict(),
        )


def _differ(before: Tensors, after: Tensors, name: str) -> bool:
    return _digest(before, name) != _digest(after, name)


def _digest(tensors: Mapping[str, object], name: str) -> str:
    return str(getattr(tensors.get(name), "digest", "absent"))
