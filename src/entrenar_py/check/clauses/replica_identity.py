"""F-DP-001: after every step all workers hold identical weights, optimizer state and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, state, weight_averages
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.causes.state import PARTS, Comparison
from entrenar_py.check.clauses import plans, ties
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing, rounds
from entrenar_py.check.evidence.needs import ALONE, SHORTENED, Traces
from entrenar_py.shared.trace import Membership, Start, Tensors, Trace, Update
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
        ties.compare(tally, trace)
        state.tell_local_buffers(tally, trace)
    for trace in traces.witnesses.get(SHORTENED, ()):
        _at_epochs_ends(tally, traces, trace)
    why = "no two workers of one run were recorded"
    return tally.finding(nothing=missing.nothing(tally, why, facts.TWO_WORKERS))


def _at_epochs_ends(tally: Tally, runs: Traces, trace: Trace) -> None:
    """Compare the workers of a run whose epochs are short, with what a script does between them.

    Whatever is open there is open in the longer runs, too.
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
    """Check that ranks which were not seen to communicate do not make the same steps.

    Ranks that are seeded alike, and draw the same samples, hold the same weights without it. What
    is not seen (a server behind a socket) would be of no use to ranks with the same gradients.
    """
    ranks = sorted({update.rank for update in trace.of(Update)})
    if not trace.traits.alone or len(ranks) < 2 or rounds.are_in(trace):
        return
    words = (
        f"{missing.named(ranks)} never communicate: no wrapper, mesh or collective connects them "
        "as they train"
    )
    if tally.broken is not None:
        tally.broken = replace(tally.broken, message=f"{tally.broken.message}; {words}")
    elif _made_the_same_steps(trace, ranks):
        tally.check(
            False,
            f"{words}, and each makes the same steps by itself: wrap the model "
            "(DistributedDataParallel), and let each rank draw its part of the samples; with "
            "accelerate on CPUs, say Accelerator(cpu=True)",
            step=min(evidence.updates(trace)),
            rank=ranks[1],
            scenario=trace.scenario,
        )


def _made_the_same_steps(trace: Trace, ranks: Sequence[int]) -> bool:
    """Return whether all ranks move weights alike in each step, by the same micro-batches."""
    shards = evidence.shards(trace)
    moved = {start.rank: _digests(start.weights) for start in trace.of(Start)}
    for step, by_rank in evidence.ranks_by_step(trace):
        work = [
            [(one.ids, _digests(one.gradient)) for one in shards.get(step, ()) if one.rank == rank]
            for rank in ranks
        ]
        is_known = all(ids or gradient for of_rank in work for ids, gradient in of_rank)
        held = [_digests(update.weights) for update in by_rank.values()]
        if not (all(work) and is_known) or any(one != work[0] for one in work):
            return False
        if len(held) < len(ranks) or any(one != held[0] for one in held):
            return False
    return moved.get(ranks[0]) not in (None, held[0])


def _digests(tensors: Tensors) -> Mapping[str, str]:
    return {name: record.digest for name, record in tensors.items()}


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
    """Return why there are no replicas, if the command starts one worker that ties no tensors."""
    return "" if any(map(ties.have_copies, traces)) else evidence.started_alone(traces)


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
            message = f"rank {start.rank} joined with other {part} than rank {lowest.rank} holds"
            step = start.step - 1
            comparison.compare(part, lowest, start, message, sharded=sharded, step=step)


def _all_updated(tally: Tally, trace: Trace) -> None:
    """Check that all members make each step that one makes, and a rank that has left makes none."""
    stays, scenario = evidence.stays(trace), trace.scenario
    moved = {change.rank for change in trace.of(Membership)}
    always = {update.rank for update in trace.of(Update)} - stays.keys() - moved
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank in sorted((evidence.members(stays, step) | always) - by_rank.keys()):
            message = f"rank {rank} made no optimizer step, the others did"
            if not tally.observed:
                message += ": it recorded no Update"
            tally.check(False, message, step=step, rank=rank, scenario=scenario)
    for ghost in evidence.ghosts(trace):
        message = f"rank {ghost.rank} had left and yet updated in step {ghost.step}"
        tally.check(False, message, **evidence.place(trace, ghost))


def _updated_once(tally: Tally, trace: Trace) -> None:
    """Check that no rank makes a step twice, unless it went back to an earlier step."""
    made: dict[int, set[int]] = {}
    for event in trace.events:
        if isinstance(event, Start):
            made[event.rank] = {step for step in made.get(event.rank, ()) if step < event.step}
        elif isinstance(event, Update):
            steps = made.setdefault(event.rank, set())
            if event.step in steps:
                message = f"rank {event.rank} updated twice in step {event.step}"
                tally.check(False, message, **evidence.place(trace, event))
            steps.add(event.step)


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
)
