"""F-TI-006, F-TI-007, F-DP-006: the same bits with any number of workers, and in each repetition.

F-DP-006: after the loss of a worker no sample is lost, and training soon returns to its trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, rounding_bounds, state
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import plans
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, rounds
from entrenar_py.check.evidence.needs import COUNTS, KILLED, REPEATED, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Membership, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Finding, Tally

_ROUNDED = "two runs agree within rounding, but not in their bits,"
_ANY_ORDER = (
    "its kernels may add in any order: with "
    "torch.use_deterministic_algorithms(True) torch uses deterministic "
    "kernels, or names the operation that has none"
)
_ADVICE = (
    "advice, since no contract was named: torch's kernels on GPUs need not give the same bits "
    "twice; --contract training-integrity-v1.yaml demands it"
)


def judge_worker_count(invariant: Invariant, runs: Traces) -> Finding:
    """Judge trainers that promise the same bits for any number of workers.

    A trainer without this promise is counted as missing.
    """
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs:
        if "bitwise" not in trace.promises:
            served = {attempt.backend for attempt in trace.of(Attempt) if attempt.served}
            names = ", ".join(sorted(served) or trace.scenario.backends)
            tally.miss(
                f"{trace.scenario.system} on {names} promises rounding, not bits: "
                'if it does give the same bits, record its trace with promises=("bitwise",)'
            )
    compare_worker_counts(tally, runs.own)
    return tally.finding(
        nothing="no two runs that differ only in world_size: record another with world_size=1, "
        f"say, and all else equal{missing.nearest(tally, runs, COUNTS)}"
    )


def judge_determinism(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that two runs of one scenario are equal in every shard and every update."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    for trace in runs.of(REPEATED):
        if runs.base is None:
            continue
        compared = Compared(runs=runs, model=runs.base, trace=trace)
        left = presuppositions.comparable(tally, presuppositions.REPEATED, compared)
        if left is not None:
            before = tally.broken
            _compare_shards(tally, left.model, left.trace)
            message = "two runs of one scenario differ"
            compare_steps(tally, left.model, left.trace, message)
            state.compare_local_buffers(tally, left.model, left.trace, f"{message} (buffers)")
            if tally.broken is not None and tally.broken is not before:
                tally.broken = _by_rounding(left, tally.broken)
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no scenario was run twice: record a second run of it, its scenario with "
            f"repeat=1 and all else equal{missing.nearest(tally, runs, REPEATED)}",
            script="the command was not run twice in the same way, or the second run failed",
        )
    )


def _by_rounding(compared: Compared, broken: Counterexample) -> Counterexample:
    """Return the counterexample. If the runs agree within rounding, it blames a GPU's kernels.

    Only the first steps can be compared within rounding.
    """
    device = compared.trace.environment.get("accelerator")
    is_early = broken.step is not None and broken.step < rounding_bounds.ROUNDING_STEPS
    is_of_values = "(buffers)" not in broken.message and _have_one_course(compared)
    if not (
        device and is_early and is_of_values and presuppositions.agree_within_rounding(compared)
    ):
        return broken
    message = f"{_ROUNDED} on {device}: {_ANY_ORDER}"
    return replace(broken, message=message)


def _have_one_course(compared: Compared) -> bool:
    """Return whether both runs took the same steps with the same samples and random numbers."""
    courses = [
        (
            set(evidence.updates(run)),
            {(one.step, one.rank, one.shard): (one.ids, one.draws) for one in run.of(Shard)},
        )
        for run in (compared.model, compared.trace)
    ]
    return courses[0] == courses[1]


def _advice(broken: Counterexample) -> str:
    return _ADVICE if broken.message.startswith(_ROUNDED) else ""


def _compare_shards(tally: Tally, model: Trace, trace: Trace) -> None:
    """Compare shard by shard. The order in which ranks were recorded does not matter."""
    # Contents are only as exact as a comparison of inputs needs.
    left_out = {"loss_sum": 0.0, "contents": (), **missing.bare_fields(tally, model, trace)}
    expected = {(shard.step, shard.rank, shard.shard): shard for shard in model.of(Shard)}
    for shard in trace.of(Shard):
        model_shard = expected.get((shard.step, shard.rank, shard.shard))
        # Another worker computed it: the first that is free may take a shard.
        if model_shard is None:
            continue
        # Compared as text, so that NaN equals NaN. Python's shortest text of a float is exact.
        same_loss = repr(model_shard.loss_sum) == repr(shard.loss_sum)
        tally.check(
            same_loss and replace(model_shard, **left_out) == replace(shard, **left_out),
            f"two runs of one scenario differ in shard {shard.shard}",
            **evidence.place(trace, shard),
        )


def compare_worker_counts(tally: Tally, traces: Sequence[Trace]) -> None:
    """Compare runs that promise equal bits with the run on the fewest workers."""
    promised = [t for t in traces if "bitwise" in t.promises and evidence.is_as_trained(t)]
    promised = [t for t in promised if _training(t.scenario) == _training(promised[0].scenario)]
    ordered = sorted(promised, key=lambda trace: trace.scenario.world_size)
    for trace in ordered[1:]:
        few, many = ordered[0].scenario.world_size, trace.scenario.world_size
        if few != many:
            message = f"{many} workers give different bits from {few}"
            compare_steps(tally, ordered[0], trace, message)


def _training(scenario: Scenario) -> Scenario:
    changes: dict[str, Any] = {"faults": (), "stops": (), "repeat": 0, "detail": "digests"}
    return scenario.with_(world_size=1, **changes)


def compare_steps(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare each rank's updates with the same rank's in `model`, bit for bit.

    If the runs have different workers, compare with the lowest rank of `model`. Gradients of
    logical shards are compared first, if they were recorded, since they name the worker that
    computed wrongly. Workers that step alone are also compared after each synchronisation. A field
    that one run never recorded is missing. A field that it stopped recording is a difference.
    """
    if not missing.require_updates(tally, model, trace):
        return
    _compare_local(tally, model, trace, message)
    expected = evidence.updates(model)
    known = missing.recorded(model), missing.recorded(trace)
    workers, model_workers = (
        (run.scenario.world_size, run.scenario.faults) for run in (trace, model)
    )
    same_workers = workers == model_workers
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            continue
        if same_workers and (alone := expected[step].keys() ^ by_rank.keys()):
            why = f"{missing.named(alone)} recorded step {step} in only one run"
            missing.ask(tally, why, facts.UPDATES_IN_BOTH)
        lowest = evidence.any_rank(expected[step])
        for rank, update in by_rank.items():
            is_own = same_workers or rounds.are_in(trace)
            peer = expected[step].get(rank, lowest) if is_own else lowest
            place = evidence.place(trace, update)
            _compare_update(tally, known, peer, update, message, place)
    _compare_rounds(tally, model, trace, message)
    lacking = sorted(set(expected) ^ set(evidence.updates(trace)))
    tally.check(
        not lacking,
        f"{message}: steps {lacking[:5]} are in only one run",
        step=lacking[0] if lacking else None,
        scenario=trace.scenario,
    )


def _compare_update(
    tally: Tally,
    known: tuple[missing.Recorded, missing.Recorded],
    model: Update,
    update: Update,
    message: str,
    place: Mapping[str, Any],
) -> None:
    """Compare an update with `model`. `known` has what each run records, the model's first."""
    for part in ("gradient", "weights", "optimizer", "buffers"):
        left, right = getattr(model, part), getattr(update, part)
        bare = [
            not getattr(holder, part) and missing.is_unknown(source, holder, part)
            for source, holder in zip(known, (model, update), strict=True)
        ]
        if any(bare) and (part == "weights" or not all(bare)):
            recording = "neither run" if all(bare) else "only one run"
            why = f"{recording} recorded the {part} of step {update.step}"
            missing.ask(tally, why, facts.of_update(part))
            continue
        closeness.compare_exact(tally, left, right, f"{message} ({part})", **place)
    if (model.loss, update.loss) != (None, None):
        tally.equal(model.loss, update.loss, f"{message} (loss)", **place)


def _compare_rounds(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the state of each worker after each synchronisation."""
    expected, got = rounds.synchronisations(model), rounds.synchronisations(trace)
    for step in sorted(expected.keys() | got.keys()):
        left, right = expected.get(step, {}), got.get(step, {})
        for rank in sorted(left.keys() | right.keys()):
            place: dict[str, Any] = {"step": step, "rank": rank, "scenario": trace.scenario}
            if rank not in left or rank not in right:
                tally.check(False, f"{message}: synchronised in only one run", **place)
                continue
            for part in ("weights", "optimizer", "buffers"):
                one, other = (getattr(side[rank], part) for side in (left, right))
                closeness.compare_exact(tally, one, other, f"{message} (outer {part})", **place)


def _compare_local(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the gradients of shards with the same samples, whichever worker computed them."""
    expected = {(shard.step, shard.shard): shard for shard in model.of(Shard)}
    begun_late = evidence.passes_begun_late(model) | evidence.passes_begun_late(trace)
    for shard in trace.of(Shard):
        model_shard = expected.get((shard.step, shard.shard))
        if model_shard is None or model_shard.ids != shard.ids:
            continue
        if (shard.step, shard.shard) in begun_late:
            continue
        if bool(model_shard.gradient) != bool(shard.gradient):
            why = f"only one run recorded the gradients of shards in step {shard.step}"
            missing.ask(tally, why, facts.of_shards("gradient"))
            continue
        what, place = f"{message} (gradient of shard {shard.shard})", evidence.place(trace, shard)
        closeness.compare_exact(tally, model_shard.gradient, shard.gradient, what, **place)


# --- recovery after the loss of a worker ----------------------------------------------------------

ON_TRAJECTORY = 0.01  # relative distance of losses, the published bound of F-DP-005


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that no sample or step is lost, and that the loss is soon back on its trajectory.

    The clause's tolerance is the number of steps after which it must be back.
    """
    tally = missing.tally_for(invariant, runs)
    _compare(tally, evidence.usable_runs(runs, tally), int(invariant.tolerance or 0))
    return tally.finding(
        nothing=missing.told(
            tally,
            trace="no worker left in any run: record one with a fault of kind leave in its "
            "scenario, and in it a Membership with change='left' where the worker has "
            "left",
            script="no worker was killed in any run that went on",
        )
    )


def _compare(tally: Tally, runs: Traces, within_steps: int) -> bool:
    """Compare every run that a worker left. Return whether losses of any run were compared."""
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
            message = "bits differ from the undisturbed run"
            compare_steps(tally, calm, trace, message)
    return is_followed


def _absent(traces: Sequence[Trace]) -> str:
    """Return why no worker of the script can return, as far as its runs show; otherwise ""."""
    if alone := evidence.started_alone(traces):
        return alone
    if {trace.traits.restarts for trace in traces} == {"nothing"}:
        return (
            "the launcher starts no worker again: its --max-restarts is 0, and "
            "F-TI-003 judges a job that is started again by hand"
        )
    killed = [trace for trace in traces if trace.scenario.faults and _departures(trace)]
    came_back = any(len(trace.of(Start)) > trace.scenario.world_size for trace in killed)
    bare = {trace.traits.saves for trace in traces} == {"nothing"}
    if killed and bare and not came_back and not any(trace.traits.unreached for trace in traces):
        return "no worker was started again, and the script writes no checkpoint to continue from"
    return ""


def _departures(trace: Trace) -> list[Membership]:
    return [change for change in trace.of(Membership) if change.change == "left"]


def _require_departures(tally: Tally, trace: Trace, left: Sequence[Membership]) -> None:
    planned = {fault.rank for fault in trace.scenario.faults if fault.kind == "leave"}
    silent = {rank for rank in planned if rank is not None} - {change.rank for change in left}
    if silent:
        why = f"{missing.named(silent)} should leave, but no departure was recorded"
        missing.ask(tally, why, facts.DEPARTURE)


def _tell_masks(tally: Tally, *, is_followed: bool) -> None:
    reason = "dropout draws different masks once a worker has left"
    if is_followed:
        tally.note(f"{reason}: losses were compared without dropout only")
    else:
        tally.miss(f"{reason}, so that losses differ: use dropout 0 in both runs")


def _no_calm_run(tally: Tally, trace: Trace, runs: Traces) -> str:
    if tally.observed:
        return "the undisturbed run, with which it would be compared, failed"
    reason = "no undisturbed run of the same training to compare with: "
    if not trace.scenario.faults:
        departure = _departures(trace)[0]
        fault = f"Fault(kind='leave', rank={departure.rank}, step={departure.step})"
        return (
            f"{reason}the run that a worker left must say so by faults=({fault},) in its scenario"
        )
    near = missing.nearest(tally, runs, KILLED)
    return f"{reason}record one with faults=() in its scenario, and all else equal{near}"


def _continues(tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership]) -> None:
    """Check that steps after a departure have all samples, and the departed rank takes none."""
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
            message = f"after worker {change.rank} left, step {step} has different samples"
            tally.check(before == after, message, step=step, sample_ids=lost, **place)
        own = [ghost.step for ghost in ghosts if ghost.rank == change.rank]
        what = f"worker {change.rank} left in step {change.step}"
        first = min(own, default=change.step)
        tally.check(not own, f"{what}, but updated in steps {own[:5]}", step=first, **place)


def _on_trajectory(
    tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership], within_steps: int
) -> bool:
    """Check that losses equal the faultless run's from `within_steps` after a departure on.

    In a shorter run only the last step is checked. Return whether both runs took a checked step.
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
        name="worker_count",
        id="F-TI-006",
        decides="trainers that promise it have the same bits with any number of workers",
        spoken_of="invariance world-size invariant",
        judge=judge_worker_count,
        plan=plans.training,
        explores=True,
        needs=(COUNTS,),
        bitwise=True,
        in_step=True,
    ),
    Check(
        name="determinism",
        id="F-TI-007",
        decides="two runs of one scenario have the same bits",
        spoken_of="determinism deterministic reproducible reproducibility repeat",
        judge=judge_determinism,
        plan=plans.training,
        explores=True,
        needs=(REPEATED,),
        advice=_advice,
    ),
    Check(
        name="recovery",
        id="F-DP-006",
        decides="if a worker dies, no sample is lost, and the loss soon returns to its trajectory",
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
