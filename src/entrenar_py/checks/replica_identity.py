"""F-DP-001: after sync and optimizer step all workers hold identical weights and optimizer state.

Also F-TI-002, which adds that a checkpoint holds what the workers held and a resume restores it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from entrenar_py.checks import evidence, history, missing
from entrenar_py.contract import Invariant
from entrenar_py.trace import Membership, Saved, Start, Tensors, Trace, Update
from entrenar_py.verdict import Finding, Tally

PARTS = ("weights", "optimizer", "buffers")


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every step, every rank, every tensor, from the state before the first step on."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        missing.require_updates(tally, trace)
        for step, starts in _initial(trace).items():
            _compare_ranks(tally, trace, step - 1, starts, PARTS)
        _compare_joined(tally, trace)
        _updated_once(tally, trace)
        _all_heard(tally, trace)
        stays = history.stays(trace)
        for step, by_rank in evidence.ranks_by_step(trace):
            _all_updated(tally, trace, step, history.members(stays, step) - set(by_rank))
            _compare_ranks(tally, trace, step, by_rank, PARTS)
    return tally.finding(
        nothing="no two workers of one run were recorded: record, with world_size >= 2, a Start "
        "and Updates with weights on every rank"
    )


def judge_state(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Optimizer state across ranks, and everything across save and load."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        missing.require_updates(tally, trace)
        for step, by_rank in evidence.ranks_by_step(trace):
            _compare_ranks(tally, trace, step, by_rank, ("optimizer",))
        _compare_restored(tally, trace)
    stateless = {trace.scenario.optimizer for trace in traces} == {"sgd"}
    why = "optimizer=sgd keeps no state" if stateless else "no optimizer state of two workers"
    return tally.finding(
        nothing=f"{why}, and no checkpoint was recorded: record, with an optimizer that has state, "
        "Update.optimizer on two ranks or more; or a Saved where a checkpoint is written, and a "
        "Start with resumed=True on every rank that loads it"
    )


def _initial(trace: Trace) -> dict[int, dict[int, Start]]:
    found: dict[int, dict[int, Start]] = {}
    for start in history.standing(trace).of(Start):
        found.setdefault(start.step, {})[start.rank] = start
    return found


def _compare_joined(tally: Tally, trace: Trace) -> None:
    """Who joins before a step holds what the others held after the one before it."""
    updates = evidence.updates(trace)
    for start in history.standing(trace).of(Start):
        others = updates.get(start.step - 1, {})
        if start.resumed or not others:
            continue
        one = evidence.any_rank(others)
        for part in PARTS:
            _compare_part(
                tally,
                part,
                one,
                start,
                f"rank {start.rank} joined with other {part} than rank {one.rank} holds",
                sharded=_is_sharded(tally, others),
                step=start.step - 1,
                rank=start.rank,
                scenario=trace.scenario.to_dict(),
            )


def _all_heard(tally: Tally, trace: Trace) -> None:
    """A worker that the scenario has and the trace does not know was compared with no one."""
    seen = {event.rank for event in trace.events if isinstance(event, Start | Update | Membership)}
    moved = {fault.rank for fault in trace.scenario.faults if fault.kind in ("leave", "join")}
    world_size = trace.scenario.world_size
    silent = sorted(set(range(world_size)) - seen - moved)
    if seen and silent:
        tally.miss(
            f"of world_size={world_size} workers ranks {silent[:8]} never started: record a Start "
            "and Updates on every rank"
        )


def _all_updated(tally: Tally, trace: Trace, step: int, idle: set[int]) -> None:
    """No member may sit out a step that another member makes."""
    for rank in sorted(idle):
        tally.check(
            False,
            f"rank {rank} made no optimizer step, the others did: it recorded no Update",
            step=step,
            rank=rank,
            scenario=trace.scenario.to_dict(),
        )


def _updated_once(tally: Tally, trace: Trace) -> None:
    """No second optimizer step after one that already stepped, unless the rank went back."""
    made: dict[int, set[int]] = {}
    for event in trace.events:
        if isinstance(event, Start):
            made[event.rank] = {step for step in made.get(event.rank, ()) if step < event.step}
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


def _is_sharded(tally: Tally, by_rank: Mapping[int, Start] | Mapping[int, Update]) -> bool:
    """Whether ranks keep the optimizer state of different tensors (ZeRO-1); says so in a note.

    No rank has all of it then. Where one has, the others have lost what they lack.
    """
    held = [set(holder.optimizer) for holder in by_rank.values()]
    everything = set().union(*held)
    sharded = all(names < everything for names in held)
    if sharded:
        tally.note("optimizer state is sharded over ranks: compared is what two of them hold")
    return sharded


def _compare_part(
    tally: Tally,
    part: str,
    expected: Start | Update | Saved,
    got: Start | Update | Saved,
    message: str,
    *,
    sharded: bool,
    **place: Any,
) -> None:
    """One part of two states; of sharded optimizer state only what both hold."""
    left, right = getattr(expected, part), getattr(got, part)
    bare = got if left else expected
    if bool(left) != bool(right) and not _is_lost(bare, part):
        _miss_part(tally, bare, part, place["step"])
        return
    if sharded and part == "optimizer":
        left, right = (
            {name: record for name, record in one.items() if name in other}
            for one, other in ((left, right), (right, left))
        )
    evidence.compare_exact(tally, left, right, message, **place)


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
    for holder in by_rank.values():
        if "weights" in parts and not holder.weights:
            _miss_part(tally, holder, "weights", step)
            return
        if (
            trace.scenario.optimizer != "sgd"
            and isinstance(holder, Update)
            and not holder.optimizer
        ):
            _miss_part(tally, holder, "optimizer", step)
    sharded = "optimizer" in parts and _is_sharded(tally, by_rank)
    for part in parts:
        held: dict[int, Tensors] = {rank: getattr(by_rank[rank], part) for rank in sorted(by_rank)}
        held = _known(tally, by_rank, part, step, held) if not sharded else held
        for name in dict.fromkeys(name for tensors in held.values() for name in tensors):
            among = held
            if sharded and part == "optimizer":
                among = _sharers(held, name)
            _compare_tensor(tally, trace, step, part, name, among)


def _known(
    tally: Tally,
    by_rank: Mapping[int, Start] | Mapping[int, Update],
    part: str,
    step: int,
    held: dict[int, Tensors],
) -> dict[int, Tensors]:
    """`held` without ranks that recorded nothing of a part that others did record."""
    found = {
        rank: tensors for rank, tensors in held.items() if tensors or _is_lost(by_rank[rank], part)
    }
    for rank in held.keys() - found.keys() if any(held.values()) else ():
        _miss_part(tally, by_rank[rank], part, step)
    return found


def _is_lost(holder: Start | Update | Saved, part: str) -> bool:
    """Whether an empty part may be a real one: optimizer state that was lost, or not saved."""
    return part == "optimizer" and not isinstance(holder, Update)


def _miss_part(tally: Tally, holder: Start | Update | Saved, part: str, step: int) -> None:
    why = f"rank {holder.rank} recorded no {part} {missing.when(step)}"
    missing.ask(tally, why, f"{type(holder).__name__}.{part}")


def _sharers(held: Mapping[int, Tensors], name: str) -> dict[int, Tensors]:
    """The ranks that share a tensor of sharded state; all, if all but one of three or more do."""
    sharers = {rank: tensors for rank, tensors in held.items() if name in tensors}
    return dict(held) if len(held) - 1 == len(sharers) > 1 else sharers


def _compare_tensor(
    tally: Tally, trace: Trace, step: int, part: str, name: str, held: Mapping[int, Tensors]
) -> None:
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
    kept, updates = history.standing(trace), evidence.updates(trace)
    for saved in kept.of(Saved):
        place = {"step": saved.step, "scenario": trace.scenario.to_dict()}
        holders = updates.get(saved.step - 1, {})
        sharded = _is_sharded(tally, holders)
        for part in PARTS if saved.rank in holders else ():
            _compare_part(
                tally,
                part,
                holders[saved.rank],
                saved,
                f"the checkpoint holds other {part} than rank {saved.rank} had",
                sharded=sharded,
                rank=saved.rank,
                **place,
            )
        resumed = [s for s in kept.of(Start) if s.resumed and s.step == saved.step]
        if not resumed:
            tally.miss(
                f"the checkpoint before step {saved.step} was never loaded: record a Start with "
                f"resumed=True and step={saved.step} on every rank that loads it"
            )
        for start in resumed:
            for part in PARTS:
                _compare_part(
                    tally,
                    part,
                    saved,
                    start,
                    f"rank {start.rank} resumed with other {part} than were saved",
                    sharded=sharded,
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
