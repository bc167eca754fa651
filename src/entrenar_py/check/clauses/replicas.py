"""F-DP-001 and F-TI-002: replicas hold the same weights, optimizer state and buffers.

If a tensor with several names (tied weights) is recorded under only one of them, it is one tensor
in memory, and has no copies that could differ. Copies on different stages of a pipeline have one
name in the trace, and are replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.causes import (
    applied_gradients,
    presuppositions,
    resumes,
    rounding_bounds,
    state,
    weight_averages,
)
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.causes.state import PARTS, Comparison
from entrenar_py.check.clauses import plans, resume
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, rounds
from entrenar_py.check.evidence.needs import ALONE, SAVED, SHORTENED, Traces
from entrenar_py.shared.trace import (
    Declared,
    Membership,
    Noticed,
    Saved,
    Start,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Tally


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge every tensor of every rank, before the first step and after each step."""
    tally = missing.tally_for(invariant, traces)
    for trace in evidence.usable(traces, tally):
        compared = Compared(runs=traces, model=trace, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.RANKS, compared)
        if left is not None:
            compare(tally, left.trace)
            missing.require_moves(tally, left.trace)
            _trained_together(tally, left.trace)
            weight_averages.compare_ranks(tally, left.trace)
        compare_ties(tally, trace)
        state.tell_local_buffers(tally, trace)
    for trace in traces.witnesses.get(SHORTENED, ()):
        if traces.base is None or traces.base.scenario.world_size == trace.scenario.world_size:
            _at_epochs_ends(tally, traces, trace)  # else a different run's finding names it
    why = "no two workers of one run were recorded"
    return tally.finding(nothing=missing.nothing(tally, why, facts.TWO_WORKERS))


def _at_epochs_ends(tally: Tally, runs: Traces, trace: Trace) -> None:
    """Compare the workers of a run with short epochs, including a script's work between epochs.

    What is missing in this run is also missing in the longer runs, and is not reported again.
    """
    trial = Tally(tally.invariant, observed=tally.observed)
    left = presuppositions.comparable(
        trial, presuppositions.RANKS, Compared(runs=runs, model=trace, trace=trace)
    )
    if left is None or trace.end.status != "completed":
        return
    comparison = Comparison(trial, left.trace)
    for step, by_rank in evidence.ranks_by_step(left.trace):
        comparison.compare_ranks(step, by_rank, PARTS)
    tally.take(trial)


def compare(tally: Tally, trace: Trace) -> None:
    """Compare the workers of one run with each other."""
    comparison = Comparison(tally, trace)
    missing.require_updates(tally, trace)
    for step, starts in _initial(trace).items():
        comparison.compare_ranks(step - 1, starts, PARTS)
    _compare_joined(comparison)
    _updated_once(tally, trace)
    require_ranks(tally, trace)
    _all_updated(tally, trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        comparison.compare_ranks(step, by_rank, PARTS)
    comparison.tell()


def _trained_together(tally: Tally, trace: Trace) -> None:
    """Check that ranks which were not seen to communicate don't take the same steps.

    Ranks that have the same seed, and draw the same samples, have the same weights without
    communication. If their gradients are the same, too, they don't communicate over a channel that
    was not seen either, such as a server, since they would have no use for it.
    """
    ranks = sorted({update.rank for update in trace.of(Update)})
    if not trace.traits.alone or len(ranks) < 2 or rounds.are_in(trace):
        return
    words = (
        f"{missing.named(ranks)} never communicate: no wrapper, mesh or collective "
        "connects them during training"
    )
    if tally.broken is not None:
        tally.broken = replace(tally.broken, message=f"{tally.broken.message}; {words}")
    elif _made_the_same_steps(trace, ranks):
        tally.check(
            False,
            f"{words}, and each makes its steps separately: wrap the model "
            "(DistributedDataParallel), and let each rank draw its part of the samples; with "
            "accelerate on CPUs, say Accelerator(cpu=True)",
            step=min(evidence.updates(trace)),
            rank=ranks[1],
            scenario=trace.scenario,
        )


def _made_the_same_steps(trace: Trace, ranks: Sequence[int]) -> bool:
    """Return whether all ranks move weights the same way in each step, by equal micro-batches."""
    shards = evidence.shards(trace)
    moved = {start.rank: evidence.digests(start.weights) for start in trace.of(Start)}
    for step, by_rank in evidence.ranks_by_step(trace):
        work = [
            [
                (shard.ids, evidence.digests(shard.gradient))
                for shard in shards.get(step, ())
                if shard.rank == rank
            ]
            for rank in ranks
        ]
        is_known = all(ids or gradient for of_rank in work for ids, gradient in of_rank)
        digests = [evidence.digests(update.weights) for update in by_rank.values()]
        if not (all(work) and is_known) or any(shard != work[0] for shard in work):
            return False
        if len(digests) < len(ranks) or any(shard != digests[0] for shard in digests):
            return False
    return moved.get(ranks[0]) not in (None, digests[0])


def require_ranks(tally: Tally, trace: Trace) -> None:
    """Count as missing the workers of the scenario that have no event in the trace."""
    seen = {event.rank for event in trace.events if isinstance(event, Start | Update)}
    moves = [fault for fault in trace.scenario.faults if fault.kind in ("leave", "join")]
    moves.sort(key=lambda fault: (fault.step or 0, fault.kind), reverse=True)  # joins come first
    first = {fault.rank: fault.kind for fault in moves}
    world_size = trace.scenario.world_size
    silent = {rank for rank in range(world_size) if first.get(rank) != "join"} - seen
    if seen and silent:
        why = f"of world_size={world_size} workers {missing.named(silent)} never started"
        missing.ask(tally, why, facts.ALL_RANKS)


def _absent(traces: Sequence[Trace]) -> str:
    return "" if any(map(have_copies, traces)) else evidence.started_alone(traces)


def _initial(trace: Trace) -> dict[int, dict[int, Start]]:
    starts_of: dict[int, dict[int, Start]] = {}
    for start in trace.standing.of(Start):
        starts_of.setdefault(start.step, {})[start.rank] = start
    return starts_of


def _compare_joined(comparison: Comparison) -> None:
    """Check that a rank that joins has the state that the others have at that time."""
    updates = evidence.updates(comparison.trace)
    for start in comparison.trace.standing.of(Start):
        others = updates.get(start.step - 1, {})
        if start.resumed or not others:
            continue
        lowest, sharded = evidence.any_rank(others), comparison.is_sharded(others)
        for part in PARTS:
            message = (
                f"rank {start.rank} joined with different {part} than rank {lowest.rank} holds"
            )
            step = start.step - 1
            comparison.compare(part, lowest, start, message, sharded=sharded, step=step)


def _all_updated(tally: Tally, trace: Trace) -> None:
    """Check that all present ranks take each step that any takes, and departed ranks take none."""
    stays, scenario = evidence.stays(trace), trace.scenario
    moved = {change.rank for change in trace.of(Membership)}
    always = {update.rank for update in trace.of(Update)} - stays.keys() - moved
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank in sorted((evidence.members(stays, step) | always) - by_rank.keys()):
            message = f"rank {rank} made no optimizer step, although the others did"
            if not tally.observed:
                message += ": it recorded no Update"
            tally.check(False, message, step=step, rank=rank, scenario=scenario)
    for ghost in evidence.ghosts(trace):
        message = f"rank {ghost.rank} had left, but updated in step {ghost.step}"
        tally.check(False, message, **evidence.place(trace, ghost))


def _updated_once(tally: Tally, trace: Trace) -> None:
    """Check that no rank takes a step twice, unless it went back to an earlier step."""
    steps_of: dict[int, set[int]] = {}
    for event in trace.events:
        if isinstance(event, Start):
            steps_of[event.rank] = {
                step for step in steps_of.get(event.rank, ()) if step < event.step
            }
        elif isinstance(event, Update):
            steps = steps_of.setdefault(event.rank, set())
            if event.step in steps:
                message = f"rank {event.rank} updated twice in step {event.step}"
                tally.check(False, message, **evidence.place(trace, event))
            steps.add(event.step)


# --- copies of one tensor on a rank ---------------------------------------------------------------

Tie = tuple[str, ...]


def compare_ties(tally: Tally, trace: Trace) -> None:
    """Compare each rank's copies of each tensor, before the first step and after each step."""
    declared = _ties(event.tied for event in trace.of(Declared))
    named = {name for tie in declared for name in tie}
    noticed = _ties(event.shared for event in trace.of(Noticed))
    for tie in declared:
        _compare_copies(tally, trace, tie)
    for tie in noticed:
        if named.isdisjoint(tie):
            _tell_parted(tally, trace, tie)
    for pair in _ties(event.alike for event in trace.of(Noticed)):
        if named.isdisjoint(pair):
            tally.note(
                f"{pair[0]} and {pair[1]} have the same values before the first step, but are "
                f"two tensors: if they should be one tensor, {_declare(pair)}"
            )


def have_copies(trace: Trace) -> bool:
    """Return whether a rank has copies of a tensor that is declared tied, or was shared."""
    declared = _ties(event.tied for event in trace.of(Declared))
    noticed = _ties(event.shared for event in trace.of(Noticed))
    return any(True for tie in (*declared, *noticed) for _ in _holders(trace, tie))


def _ties(events: Iterable[Sequence[Tie]]) -> list[Tie]:
    return list(dict.fromkeys(tie for ties in events for tie in ties))


def _holders(trace: Trace, tie: Tie) -> Iterator[tuple[Start | Update, int, list[str]]]:
    for event in trace.standing.events:
        if isinstance(event, Start | Update):
            held = [name for name in tie if name in event.weights]
            if len(held) > 1:
                yield event, event.step - isinstance(event, Start), held


def _compare_copies(tally: Tally, trace: Trace, tie: Tie) -> None:
    for event, step, names in _holders(trace, tie):
        first = event.weights[names[0]]
        for name in names[1:]:
            copy = event.weights[name]
            if copy.digest == first.digest:
                tally.compared += 1
                continue
            tally.check(
                False,
                f"rank {event.rank} holds two copies of a tied tensor that differ: {name} is not "
                f"{names[0]}",
                step=step,
                rank=event.rank,
                tensor=name,
                scenario=trace.scenario,
                **closeness.difference(first, copy),
            )


def _tell_parted(tally: Tally, trace: Trace, tie: Tie) -> None:
    """Report names of one tensor that became two tensors. Nobody declared whether that is right."""
    for event, step, names in _holders(trace, tie):
        first = event.weights[names[0]]
        apart = next((name for name in names if event.weights[name].digest != first.digest), "")
        what = f"{names[0]} and {apart or names[1]} were one tensor when observe() was called, and"
        if apart:
            when = missing.when(step)
            tally.miss(f"{what} differ {when} on rank {event.rank}: {_declare(tie)}")
            return
        tally.note(f"{what} are two tensors that agree: to have them compared, {_declare(tie)}")


def _declare(tie: Tie) -> str:
    return f"declare observe(..., tied=({tie!r},))"


# --- the optimizer's state ------------------------------------------------------------------------


def judge_state(invariant: Invariant, traces: Traces) -> Finding:
    """Judge optimizer state across ranks, and the whole state across save and load.

    A user's checkpoints are not recorded. So the state of a rank that resumes is compared with its
    state before the stop.
    """
    tally = missing.tally_for(invariant, traces)
    stopped = traces.of(SAVED)
    for run in evidence.usable(stopped or traces, tally):
        resumes.compare_state(tally, traces.base if stopped else None, run, ("optimizer",))
        compared = Compared(runs=traces, model=run, trace=run)
        left = presuppositions.comparable(tally, presuppositions.RANKS, compared)
        if left is None:
            continue
        trace = left.trace
        comparison = Comparison(tally, trace)
        if _is_the_server_s(trace):
            tally.miss(
                "the server makes the updates: only the server holds the optimizer's state, and "
                "the state that it resumes with is not recorded; F-TI-003 and F-TI-008 judge the "
                "resulting weights"
            )
        is_elsewhere = trace.traits.steps != "model" and not any(
            update.optimizer for update in trace.of(Update)
        )
        # If weights follow the rule from the first step on, the state that moved them was right.
        if is_elsewhere and not applied_gradients.follow_copies(tally, traces, trace):
            tally.miss("the optimizer's state belongs to copies of the weights, or to shards")
        missing.require_updates(tally, trace)
        require_ranks(tally, trace)
        for step, by_rank in evidence.ranks_by_step(trace):
            comparison.compare_ranks(step, by_rank, ("optimizer",))
        _compare_restored(tally, comparison)
        comparison.tell()
    if tally.observed:
        _compare_owners(tally, traces)
    stateless = {trace.scenario.optimizer for trace in traces} == {"sgd"}
    reason = "optimizer=sgd keeps no state" if stateless else "no optimizer state of two workers"
    if tally.observed and any(map(_is_spread, traces)):
        return tally.finding(
            nothing="each rank keeps the optimizer's state of its own parameters, and no two ranks "
            "keep the state of the same parameter (ZeroRedundancyOptimizer): stop and resume the "
            "run to have it judged, with {workdir} in the command"
        )
    return tally.finding(
        nothing=missing.told(
            tally,
            trace=f"{reason}, and no checkpoint was recorded: record, with an optimizer that has "
            "state, Update.optimizer on two ranks or more; or a Saved where a checkpoint is "
            "written, and a Start with resumed=True on every rank that loads it",
            script=_no_state_to_compare(traces, reason),
        )
    )


def _no_state_to_compare(traces: Traces, reason: str) -> str:
    if not any(update.optimizer for trace in traces for update in trace.of(Update)):
        return f"{reason}: try an optimizer that keeps some, such as SGD with momentum"
    return (
        f"{reason}, and no run continued from a checkpoint: put {{world_size}} where the command "
        "takes the number of workers, or see F-TI-003"
    )


def _absent_state(traces: Sequence[Trace]) -> str:
    """Return why there is no state to compare, as far as all runs show; "" if there may be some.

    Reasons are that no optimizer ever had state, or that no two ranks keep the state of one tensor.
    """
    updates = [update for trace in traces for update in trace.of(Update)]
    several = [trace for trace in traces if trace.scenario.world_size > 1]
    if several and all(trace.of(Update) and _is_in_one_place(trace) for trace in several):
        return "each tensor's state is kept by only one rank, and the script writes no checkpoint"
    if not updates:
        return ""
    if several and all(rounds.are_in(t) and t.traits.saves == "nothing" for t in several):
        return rounds.OWN_STATE
    if any(update.optimizer for update in updates):
        return _undivided(traces)
    if {trace.scenario.optimizer for trace in traces} == {"sgd"}:
        return "the optimizer keeps no state: it is SGD without momentum"
    if {trace.traits.rule for trace in traces} == {"own"}:
        return "the optimizer keeps no state: no rank had some after any step"
    return ""


def _undivided(traces: Sequence[Trace]) -> str:
    may_resume = any(trace.scenario.stops for trace in traces) and not resume.absent(traces)
    return "" if may_resume else evidence.started_alone(traces)


def _is_in_one_place(trace: Trace) -> bool:
    steps = [by_rank for _, by_rank in evidence.ranks_by_step(trace)]
    return trace.traits.saves == "nothing" and all(
        _are_spread(by_rank) for by_rank in steps if by_rank
    )


def _is_spread(trace: Trace) -> bool:
    return _are_spread(next((by_rank for _, by_rank in evidence.ranks_by_step(trace)), {}))


def _are_spread(by_rank: Mapping[int, Update]) -> bool:
    kept = [{*update.optimizer} for update in by_rank.values()]
    return len(kept) > 1 and all(kept) and len(set().union(*kept)) == sum(map(len, kept))


def _compare_owners(tally: Tally, runs: Traces) -> None:
    """Count as compared the state that is spread over ranks, if together it is one worker's.

    Only the first state is compared, which follows from one gradient. If it differs, nothing is
    reported here, since the worker may have had different samples, and wrong moments show in the
    weights.
    """
    if runs.base is None or not _is_spread(runs.base):
        return
    updates = evidence.updates(runs.base)
    first = min(
        step for step, by_rank in updates.items() if any(u.optimizer for u in by_rank.values())
    )
    states = {name: record for u in updates[first].values() for name, record in u.optimizer.items()}
    for model in runs.witnesses.get(ALONE, ()):
        alone = evidence.updates(model).get(first, {})
        due = evidence.any_rank(alone).optimizer if alone else {}
        bound = 2 * rounding_bounds.Bounds.of({}, model, runs.base).gradient
        gaps = closeness.distances(due, states) if due.keys() == states.keys() else None
        if gaps and all(gap.distance <= bound * gap.size for gap in gaps.values()):
            tally.compared += len(gaps)
            tally.note(
                "each rank keeps the optimizer's state of its own parameters: together it equals "
                f"the state of one worker after step {first}"
            )


def _is_the_server_s(trace: Trace) -> bool:
    return trace.scenario.optimizer != "sgd" and trace.traits.updates == "server"


def _parts(trace: Trace) -> tuple[str, ...]:
    return tuple(part for part in PARTS if part != "optimizer" or not _is_the_server_s(trace))


def _compare_restored(tally: Tally, comparison: Comparison) -> None:
    """Compare each checkpoint with the state of its writer, and of every rank that loaded it."""
    kept, updates = comparison.trace.standing, evidence.updates(comparison.trace)
    for saved in kept.of(Saved):
        holders = updates.get(saved.step - 1, {})
        sharded = comparison.is_sharded(holders)
        if holders and saved.rank not in holders:
            why = f"rank {saved.rank} saved before step {saved.step}"
            fact = facts.of_step(saved.step - 1)
            missing.ask(tally, f"{why}, and its own state is unknown", fact)
        for part in _parts(comparison.trace) if saved.rank in holders else ():
            message = f"the checkpoint holds different {part} than rank {saved.rank} had"
            own, step = holders[saved.rank], saved.step
            comparison.compare(part, own, saved, message, sharded=sharded, step=step)
        starts = [start for start in kept.of(Start) if start.step == saved.step]
        resumed = [start for start in starts if start.resumed]
        silent = updates.get(saved.step, {}).keys() - {start.rank for start in starts}
        if not resumed or silent:
            ranks = f" by {missing.named(silent)}" if resumed else ""
            tally.miss(
                f"the checkpoint before step {saved.step} was never loaded{ranks}: record a Start "
                f"with resumed=True and step={saved.step} on every rank that loads it"
            )
        for start in resumed:
            _compare_loaded(tally, comparison, saved, start, sharded=sharded)


def _compare_loaded(
    tally: Tally, comparison: Comparison, saved: Saved, start: Start, *, sharded: bool
) -> None:
    for part in _parts(comparison.trace):
        message = f"rank {start.rank} resumed with different {part} than were saved"
        comparison.compare(part, saved, start, message, sharded=sharded, step=saved.step)
    message = f"rank {start.rank} resumed at a different position than the saved one"
    place = evidence.place(comparison.trace, start)
    tally.equal(dict(saved.progress), dict(start.progress), message, **place)


ROWS = (
    Check(
        name="replica_identity",
        id="F-DP-001",
        decides="after every step all workers hold the same weights, optimizer state and buffers",
        spoken_of="weight consistency identical divergence broadcast replicas moments synced",
        judge=judge,
        plan=plans.training,
        explores=True,
        witnesses=(ALONE, SHORTENED),
        in_step=True,
        takes_turned=True,
        takes_resumed=True,
        absent=_absent,
    ),
    Check(
        name="optimizer_state",
        id="F-TI-002",
        decides="optimizer state agrees on all workers and survives save and load",
        spoken_of="optimizer state restore restored moments checkpointed",
        judge=judge_state,
        plan=plans.stops,
        explores=True,
        needs=(SAVED,),
        witnesses=(ALONE,),
        in_step=True,
        absent=_absent_state,
        takes_turned=True,
    ),
)
