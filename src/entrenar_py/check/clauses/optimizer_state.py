"""F-TI-002: optimizer state is equal on all workers, and survives checkpoint and resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrenar_py.check import evidence
from entrenar_py.check.causes import applied_gradients, presuppositions, resumes, rounding_bounds
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.causes.state import PARTS, Comparison
from entrenar_py.check.clauses import plans, replica_identity
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, rounds
from entrenar_py.check.evidence.needs import ALONE, SAVED, Traces
from entrenar_py.shared.trace import Saved, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge optimizer state across ranks, and the whole state across save and load.

    A user's checkpoints are not recorded. The state of a rank that resumes is compared with its
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
                "the server makes the updates: it alone holds the optimizer's state, and what it "
                "resumes with is not recorded; F-TI-003 and F-TI-008 judge the resulting weights"
            )
        is_elsewhere = trace.traits.steps != "model" and not any(
            update.optimizer for update in trace.of(Update)
        )
        # Weights that follow the rule from the first step on have its state behind them.
        if is_elsewhere and not applied_gradients.follow_copies(tally, traces, trace):
            tally.miss("the optimizer's state is that of copies of the weights, or of shards")
        missing.require_updates(tally, trace)
        replica_identity.require_ranks(tally, trace)
        for step, by_rank in evidence.ranks_by_step(trace):
            comparison.compare_ranks(step, by_rank, ("optimizer",))
        _compare_restored(tally, comparison)
        comparison.tell()
    if tally.observed:
        _compare_owners(tally, traces)
    stateless = {trace.scenario.optimizer for trace in traces} == {"sgd"}
    why = "optimizer=sgd keeps no state" if stateless else "no optimizer state of two workers"
    if tally.observed and any(map(_is_spread, traces)):
        return tally.finding(
            nothing="each rank keeps the optimizer's state of parameters of its own, and no two "
            "ranks keep that of one (ZeroRedundancyOptimizer): stop and resume the run to have it "
            "judged, with {workdir} in the command"
        )
    return tally.finding(
        nothing=missing.told(
            tally,
            trace=f"{why}, and no checkpoint was recorded: record, with an optimizer that has "
            "state, Update.optimizer on two ranks or more; or a Saved where a checkpoint is "
            "written, and a Start with resumed=True on every rank that loads it",
            script=f"{why}: try the script with an optimizer that keeps some, such as momentum",
        )
    )


def _absent(traces: Sequence[Trace]) -> str:
    """Return why there is no state to compare, if no optimizer of any rank ever had some."""
    updates = [update for trace in traces for update in trace.of(Update)]
    several = [trace for trace in traces if trace.scenario.world_size > 1]
    if several and all(trace.of(Update) and _is_in_one_place(trace) for trace in several):
        return "each tensor's state is kept by one rank alone, and the script writes no checkpoint"
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
    """Return why there is no state to compare, if one worker alone keeps it and never resumed."""
    is_resumed = any(trace.scenario.stops for trace in traces)
    return "" if is_resumed else evidence.started_alone(traces)


def _is_in_one_place(trace: Trace) -> bool:
    """Return whether after every step each tensor's state is on one rank alone, none on disk."""
    steps = [by_rank for _, by_rank in evidence.ranks_by_step(trace)]
    return trace.traits.saves == "nothing" and all(
        _are_spread(by_rank) for by_rank in steps if by_rank
    )


def _is_spread(trace: Trace) -> bool:
    """Return whether all ranks keep state, and each of other parameters."""
    return _are_spread(next((by_rank for _, by_rank in evidence.ranks_by_step(trace)), {}))


def _are_spread(by_rank: Mapping[int, Update]) -> bool:
    kept = [{*update.optimizer} for update in by_rank.values()]
    return len(kept) > 1 and all(kept) and len(set().union(*kept)) == sum(map(len, kept))


def _compare_owners(tally: Tally, runs: Traces) -> None:
    """Count the state that ranks keep each of other parameters, if it is that of one worker.

    Only the first state is compared, which follows from one gradient. If it differs nothing is
    said here: the worker may have had other samples, and wrong moments show in the weights.
    """
    if runs.base is None or not _is_spread(runs.base):
        return
    made = evidence.updates(runs.base)
    first = min(
        step for step, by_rank in made.items() if any(u.optimizer for u in by_rank.values())
    )
    held = {name: one for u in made[first].values() for name, one in u.optimizer.items()}
    for model in runs.witnesses.get(ALONE, ()):
        alone = evidence.updates(model).get(first, {})
        due = evidence.any_rank(alone).optimizer if alone else {}
        bound = 2 * rounding_bounds.Bounds.of({}, model, runs.base).gradient
        gaps = closeness.distances(due, held) if due.keys() == held.keys() else None
        if gaps and all(gap.distance <= bound * gap.size for gap in gaps.values()):
            tally.compared += len(gaps)
            tally.note(
                "each rank keeps the optimizer's state of parameters of its own: all of it is that "
                f"of one worker after step {first}"
            )


def _is_the_server_s(trace: Trace) -> bool:
    """Return whether the optimizer has state, and only the server keeps it."""
    return trace.scenario.optimizer != "sgd" and trace.traits.updates == "server"


def _parts(trace: Trace) -> tuple[str, ...]:
    """Return the checkpoint's parts that workers hold, too: all but a server's optimizer state."""
    return tuple(part for part in PARTS if part != "optimizer" or not _is_the_server_s(trace))


def _compare_restored(tally: Tally, comparison: Comparison) -> None:
    """Compare each checkpoint with the states of its writer and of every rank that loaded it."""
    kept, updates = comparison.trace.standing, evidence.updates(comparison.trace)
    for saved in kept.of(Saved):
        holders = updates.get(saved.step - 1, {})
        sharded = comparison.is_sharded(holders)
        if holders and saved.rank not in holders:
            why = f"rank {saved.rank} saved before step {saved.step}"
            fact = facts.of_step(saved.step - 1)
            missing.ask(tally, f"{why}, and its own state is unknown", fact)
        for part in _parts(comparison.trace) if saved.rank in holders else ():
            message = f"the checkpoint holds other {part} than rank {saved.rank} had"
            own, step = holders[saved.rank], saved.step
            comparison.compare(part, own, saved, message, sharded=sharded, step=step)
        starts = [start for start in kept.of(Start) if start.step == saved.step]
        resumed = [start for start in starts if start.resumed]
        silent = updates.get(saved.step, {}).keys() - {start.rank for start in starts}
        if not resumed or silent:
            who = f" by {missing.named(silent)}" if resumed else ""
            tally.miss(
                f"the checkpoint before step {saved.step} was never loaded{who}: record a Start "
                f"with resumed=True and step={saved.step} on every rank that loads it"
            )
        for start in resumed:
            _compare_loaded(tally, comparison, saved, start, sharded=sharded)


def _compare_loaded(
    tally: Tally, comparison: Comparison, saved: Saved, start: Start, *, sharded: bool
) -> None:
    for part in _parts(comparison.trace):
        message = f"rank {start.rank} resumed with other {part} than were saved"
        comparison.compare(part, saved, start, message, sharded=sharded, step=saved.step)
    message = f"rank {start.rank} resumed at another position than was saved"
    place = evidence.place(comparison.trace, start)
    tally.equal(dict(saved.progress), dict(start.progress), message, **place)


ROWS = (
    Check(
        name="optimizer_state",
        id="F-TI-002",
        decides="optimizer state agrees on all workers and survives save and load",
        spoken_of="optimizer state restore restored moments checkpointed",
        judge=judge,
        plan=plans.stops,
        explores=True,
        needs=(SAVED,),
        witnesses=(ALONE,),
        in_step=True,
        absent=_absent,
        takes_turned=True,
    ),
)
