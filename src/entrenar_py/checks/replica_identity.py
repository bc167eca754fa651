"""F-DP-001: after sync and optimizer step all workers hold identical weights and optimizer state.

Also F-TI-002, which adds that a checkpoint holds what the workers held and a resume restores it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.trace import Membership, Saved, Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Tally

PARTS = ("weights", "optimizer", "buffers")


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every step, every rank, every tensor, from the state before the first step on."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for step, starts in _initial(trace).items():
            _compare_ranks(tally, trace, step - 1, starts, PARTS)
        _compare_joined(tally, trace)
        _updated_once(tally, trace)
        for step, by_rank in evidence.ranks_by_step(trace):
            _all_updated(tally, trace, step, by_rank)
            _compare_ranks(tally, trace, step, by_rank, PARTS)
    return tally.finding(nothing="no run with two workers whose weights were recorded")


def judge_state(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Optimizer state across ranks, and everything across save and load."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for step, by_rank in evidence.ranks_by_step(trace):
            _compare_ranks(tally, trace, step, by_rank, ("optimizer",))
        _compare_restored(tally, trace)
    return tally.finding(nothing="no optimizer state of two workers, and no checkpoint, was seen")


def _initial(trace: Trace) -> dict[int, dict[int, Start]]:
    found: dict[int, dict[int, Start]] = {}
    for start in trace.of(Start):
        found.setdefault(start.step, {})[start.rank] = start
    return found


def _compare_joined(tally: Tally, trace: Trace) -> None:
    """Who joins before a step holds what the others held after the one before it."""
    updates = evidence.updates(trace)
    for start in trace.of(Start):
        others = updates.get(start.step - 1, {})
        if start.resumed or not others:
            continue
        one = evidence.any_rank(others)
        for part in PARTS:
            evidence.compare_exact(
                tally,
                getattr(one, part),
                getattr(start, part),
                f"rank {start.rank} joined with other {part} than rank {one.rank} holds",
                step=start.step - 1,
                rank=start.rank,
                scenario=trace.scenario.to_dict(),
            )


def _all_updated(tally: Tally, trace: Trace, step: int, by_rank: Mapping[int, Update]) -> None:
    """No member may sit out a step that another member makes."""
    members = {start.rank for start in trace.of(Start) if start.step <= step}
    for change in trace.of(Membership):
        if change.change == "left" and change.step <= step:
            later = [s for s in trace.of(Start) if s.rank == change.rank and s.step > change.step]
            if not any(start.step <= step for start in later):
                members.discard(change.rank)
    for rank in sorted(members - set(by_rank)):
        tally.check(
            False,
            f"rank {rank} made no optimizer step, the others did",
            step=step,
            rank=rank,
            scenario=trace.scenario.to_dict(),
        )


def _updated_once(tally: Tally, trace: Trace) -> None:
    """No second optimizer step after one that already stepped, unless the rank started again."""
    made: dict[int, set[int]] = {}
    for event in trace.events:
        if isinstance(event, Start):
            made[event.rank] = set()
        elif isinstance(event, Update):
            steps = made.setdefault(event.rank, set())
            if event.step in steps:
                tally.check(
                    False,
                    f"rank {event.rank} updated twice in step {event.step}",
                    step=event.step,
                    rank=event.rank,
                    scenario=trace.scenario.to_dict(),
                )
            steps.add(event.step)


def _compare_ranks(
    tally: Tally,
    trace: Trace,
    step: int,
    by_rank: Mapping[int, Start] | Mapping[int, Update],
    parts: Sequence[str],
) -> None:
    """Each rank against what most ranks hold (of two, the lower rank), so the culprit is named."""
    if len(by_rank) < 2:
        return
    for rank, holder in by_rank.items():
        if not holder.weights:
            tally.miss(f"rank {rank} did not record its weights in step {step}")
            return
        if (
            trace.scenario.optimizer != "sgd"
            and isinstance(holder, Update)
            and not holder.optimizer
        ):
            tally.miss(f"rank {rank} did not record its optimizer state in step {step}")
    for part in parts:
        held: dict[int, Tensors] = {rank: getattr(by_rank[rank], part) for rank in sorted(by_rank)}
        names = list(dict.fromkeys(name for tensors in held.values() for name in tensors))
        for name in names:
            digests = {rank: t[name].digest if name in t else "absent" for rank, t in held.items()}
            usual = Counter(digests.values()).most_common(1)[0][0]
            model = next(rank for rank, digest in digests.items() if digest == usual)
            for rank in digests:
                if rank != model:
                    evidence.compare_exact(
                        tally,
                        {name: held[model][name]} if name in held[model] else {},
                        {name: held[rank][name]} if name in held[rank] else {},
                        f"rank {rank} and rank {model} hold different {part}",
                        step=step,
                        rank=rank,
                        scenario=trace.scenario.to_dict(),
                    )


def _compare_restored(tally: Tally, trace: Trace) -> None:
    updates = evidence.updates(trace)
    for saved in trace.of(Saved):
        place = {"step": saved.step, "scenario": trace.scenario.to_dict()}
        before = updates.get(saved.step - 1, {}).get(saved.rank)
        for part in PARTS if before is not None else ():
            evidence.compare_exact(
                tally,
                getattr(before, part),
                getattr(saved, part),
                f"the checkpoint holds other {part} than rank {saved.rank} had",
                rank=saved.rank,
                **place,
            )
        resumed = [s for s in trace.of(Start) if s.resumed and s.step == saved.step]
        if not resumed:
            tally.miss(f"a checkpoint before step {saved.step} was never loaded")
        for start in resumed:
            for part in PARTS:
                evidence.compare_exact(
                    tally,
                    getattr(saved, part),
                    getattr(start, part),
                    f"rank {start.rank} resumed with other {part} than were saved",
                    rank=start.rank,
                    **place,
                )
            tally.equal(
                dict(saved.progress),
                dict(start.progress),
                f"rank {start.rank} resumed at another position than was saved",
                rank=start.rank,
                **place,
            )
