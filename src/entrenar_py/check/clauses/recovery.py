"""F-DP-006: losing a worker loses no sample, and the training soon returns to its trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans, same_bits
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing
from entrenar_py.check.evidence.needs import KILLED, REPEATED, Traces
from entrenar_py.shared.trace import Membership, Start, Trace
from entrenar_py.shared.verdict import Finding, Tally

ON_TRAJECTORY = 0.01  # relative distance of losses, the published bound of F-DP-005


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that no sample or step is lost, and the loss returns within the tolerated steps."""
    tally = missing.tally_for(invariant, runs)
    _compare(tally, evidence.usable_runs(runs, tally), int(invariant.tolerance or 0))
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no worker left in any run: record one with a fault of kind leave in its "
            "scenario, and in it a Membership with change='left' where the worker is gone",
            script="no worker was killed in any run that went on",
        )
    )


def _compare(tally: Tally, runs: Traces, within_steps: int) -> bool:
    """Compare every run that a worker left. Return whether the losses of any were compared."""
    base, is_followed = runs.base, False
    calm = None if base is None or base.scenario.faults or _departures(base) else base
    undropped = runs.undropped is not None and _compare(tally, runs.undropped, within_steps)
    for trace in runs.own:
        left = _departures(trace)
        if not left or not evidence.is_as_trained(trace):
            continue
        if calm is None:
            tally.miss(_no_calm_run(tally, trace, runs))
            continue
        if not missing.require_updates(tally, calm, trace):
            continue
        _require_departures(tally, trace, left)
        compared = Compared(runs=runs, model=calm, trace=trace)
        if presuppositions.comparable(tally, presuppositions.KILLED, compared) is None:
            continue
        missing.require_moves(tally, calm)
        _continues(tally, calm, trace, left)
        if trace.scenario.dropout and not trace.draws_by_shard:  # masks depend on the ranks present
            _tell_masks(tally, is_followed=undropped)
        elif _on_trajectory(tally, calm, trace, left, within_steps):
            is_followed = True
        if "bitwise" in trace.promises:
            message = "bits differ from those of the undisturbed run"
            same_bits.compare_steps(tally, calm, trace, message)
    return is_followed


def _absent(traces: Sequence[Trace]) -> str:
    """Return why no worker of the script can come back, as far as its runs show."""
    if alone := evidence.started_alone(traces):
        return alone
    if {trace.traits.restarts for trace in traces} == {"nothing"}:
        return (
            "the launcher starts no worker again: its --max-restarts is 0, and what a job does "
            "that is started again by hand is F-TI-003's"
        )
    killed = [trace for trace in traces if trace.scenario.faults and _departures(trace)]
    came_back = any(len(trace.of(Start)) > trace.scenario.world_size for trace in killed)
    bare = {trace.traits.saves for trace in traces} == {"nothing"}
    if killed and bare and not came_back and not any(trace.traits.unreached for trace in traces):
        return "no worker was started again, and the script writes no checkpoint to go on from"
    return ""


def _departures(trace: Trace) -> list[Membership]:
    return [change for change in trace.of(Membership) if change.change == "left"]


def _require_departures(tally: Tally, trace: Trace, left: Sequence[Membership]) -> None:
    """Count as missing the planned departures that were not recorded."""
    planned = {fault.rank for fault in trace.scenario.faults if fault.kind == "leave"}
    silent = {rank for rank in planned if rank is not None} - {change.rank for change in left}
    if silent:
        why = f"{missing.named(silent)} was to leave, and no departure was recorded"
        missing.ask(tally, why, facts.DEPARTURE)


def _tell_masks(tally: Tally, *, is_followed: bool) -> None:
    """Report differing masks: as a note if runs without dropout were compared, else as missing."""
    why = "dropout draws other masks once a worker has left"
    if is_followed:
        tally.note(f"{why}: losses were compared without dropout only")
    else:
        tally.miss(f"{why}, so that losses differ: use dropout 0 in both runs")


def _no_calm_run(tally: Tally, trace: Trace, runs: Traces) -> str:
    if tally.observed:
        return "the undisturbed run, with which it would be compared, failed"
    why = "no undisturbed run of the same training to compare with: "
    if not trace.scenario.faults:
        departure = _departures(trace)[0]
        fault = f"Fault(kind='leave', rank={departure.rank}, step={departure.step})"
        return f"{why}the run that a worker left must say so by faults=({fault},) in its scenario"
    near = missing.nearest(tally, runs, KILLED)
    return f"{why}record one with faults=() in its scenario, and all else equal{near}"


def _continues(tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership]) -> None:
    """Check that steps after a departure have all samples, and the rank that left makes none."""
    expected, got = evidence.shards(calm), evidence.shards(trace)
    model_updates = evidence.updates(calm)
    unknown = missing.unknown_steps(calm) | missing.unknown_steps(trace)
    ghosts = evidence.ghosts(trace)
    if not model_updates:
        tally.miss("the undisturbed run made no step")
    for change in left:
        place = {"rank": change.rank, "scenario": trace.scenario}
        for step in sorted(step for step in model_updates if step >= change.step):
            if step in unknown:
                why = f"the samples of step {step} are unknown"
                missing.ask(tally, why, facts.IDS_IN_BOTH)
                continue
            before = sorted(i for shard in expected[step] for i in shard.ids)
            after = sorted(i for shard in got.get(step, ()) for i in shard.ids)
            lost = tuple(sorted(set(before) ^ set(after)))
            message = f"after worker {change.rank} left, step {step} has other samples"
            tally.check(before == after, message, step=step, sample_ids=lost, **place)
        own = [ghost.step for ghost in ghosts if ghost.rank == change.rank]
        what = f"worker {change.rank} left in step {change.step}"
        first = min(own, default=change.step)
        tally.check(not own, f"{what} and yet updated in steps {own[:5]}", step=first, **place)


def _on_trajectory(
    tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership], within_steps: int
) -> bool:
    """Check that losses equal the faultless run's, from `within_steps` after a departure on.

    In a shorter run only the last step is checked. Return whether both runs made a step.
    """
    calm, trace = evidence.with_losses(calm), evidence.with_losses(trace)
    expected, got = evidence.updates(calm), evidence.updates(trace)
    if not expected or not got:
        return False
    last = max(expected)
    for change in left:
        for step in range(min(change.step + within_steps, last), last + 1):
            place = {"step": step, "rank": change.rank, "scenario": trace.scenario}
            if step not in expected:
                why = f"the undisturbed run has no step {step}"
                missing.ask(tally, why, facts.UPDATES_OF_CALM)
                continue
            if step not in got:
                tally.check(False, f"no step {step} after worker {change.rank} left", **place)
                continue
            model_loss = evidence.any_rank(expected[step]).loss
            loss = evidence.any_rank(got[step]).loss
            if model_loss is None or loss is None:
                missing.ask(tally, f"the loss of step {step} is unknown", facts.LOSS_OF_UPDATE)
                continue
            if not math.isfinite(model_loss):
                tally.miss(f"the undisturbed run's loss of step {step} is not finite")
                continue
            num_steps = f"{step - change.step} steps after worker {change.rank} left"
            message = f"loss is not back on the trajectory {num_steps}"
            tally.close(model_loss, loss, ON_TRAJECTORY * abs(model_loss) + 1e-7, message, **place)
    return True


ROWS = (
    Check(
        name="recovery",
        id="F-DP-006",
        decides="a worker's loss costs no sample, and the loss is soon back on its trajectory",
        spoken_of="fault tolerance disconnect worker drop failure recovers redistribute",
        judge=judge,
        plan=plans.departures,
        explores=True,
        needs=(KILLED,),
        witnesses=(REPEATED,),
        tolerance_kinds=("steps",),
        takes_tolerance=True,
        in_step=True,
        absent=_absent,
    ),
)
