"""Test whether the learning rate of a script's own schedule is a function of the step alone.

Its closed form is unknown here. Its values are compared with those of the same steps in the same
run made again, and on one worker. A schedule that follows a metric must get the same on all ranks.
Runs on other numbers of workers whose metrics differ are compared up to there.
"""

from __future__ import annotations

import math

from entrenar_py.check import evidence
from entrenar_py.check.causes import applied_gradients
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import ALONE, REPEATED, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace, Update
from entrenar_py.shared.verdict import Tally

RATE_BOUND = 1e-6  # relative: the product of a few float64 numbers
METRIC_BOUND = 1e-3  # relative: an evaluation of the same samples differs by rounding


def compare(tally: Tally, runs: Traces) -> None:
    """Compare the rates of the base with the witnesses'. One that differs is missing, not wrong.

    Some scripts scale the rate by the number of workers. Where one worker has smaller batches, it
    has more steps in an epoch, and rightly a longer schedule: F-DP-005 compares it with batches of
    the same size.
    """
    base = runs.base
    if base is None or base.traits.schedule != "other":
        return
    others = [run for need in (REPEATED, ALONE) for run in runs.witnesses.get(need, ())]
    others = [run for run in others if run is not base and run.end.status == "completed"]
    if not others:
        tally.miss(
            "the learning rate changes by a schedule that is not known here, and there is no other "
            "run to compare it with"
        )
    for other in others:
        if other.scenario.batch_size != base.scenario.batch_size:
            continue
        divided = applied_gradients.in_rate(Compared(runs=runs, model=other, trace=base))
        _compare(tally, base, other, divided)


def compare_metrics(tally: Tally, trace: Trace) -> None:
    """Check that the schedules of all ranks follow one metric, as their rates part otherwise.

    They may part much later: where the metric of one rank still improves, and another's does not.
    """
    for _, by_rank in evidence.ranks_by_step(trace):
        known = {rank: u.metric for rank, u in sorted(by_rank.items()) if u.metric is not None}
        if len(known) < trace.scenario.world_size or len(known) < 2:
            continue
        first = min(known)
        for rank, metric in known.items():
            if rank == first:
                continue
            place = evidence.place(trace, by_rank[rank])
            tally.check(
                math.isclose(metric, known[first], rel_tol=METRIC_BOUND),
                f"the schedule of rank {rank} follows a metric that is {metric:.4g} at best, and "
                f"{known[first]:.4g} on rank {first}: once one of them reduces its learning rate, "
                "ranks step apart; take the mean over ranks before scheduler.step(metric)",
                expected=repr(known[first]),
                got=repr(metric),
                **place,
            )


def _compare(tally: Tally, base: Trace, other: Trace, divided: float) -> None:
    """Compare the rates of two runs; those of `base` are `divided` by what its gradients aren't."""
    expected = evidence.updates(other)
    is_same = other.scenario.world_size == base.scenario.world_size
    for step, by_rank in evidence.ranks_by_step(base):
        if step not in expected:
            continue
        model, made = evidence.any_rank(expected[step]), evidence.any_rank(by_rank)
        if not is_same and _follow_others(model, made):
            return
        due, got = model.learning_rate, made.learning_rate
        if not math.isclose(due, got * divided, rel_tol=RATE_BOUND):
            rates = _told((base.scenario, got), (other.scenario, due))
            tally.miss(
                f"the learning rate of step {step} is {rates}: make the schedule a function of the "
                "step, with the same length in every run"
            )
            return
        tally.compared += 1


def _follow_others(model: Update, made: Update) -> bool:
    """Return whether two steps' schedules follow metrics that differ, as their weights may."""
    if model.metric is None or made.metric is None:
        return False
    return not math.isclose(model.metric, made.metric, rel_tol=METRIC_BOUND)


def _told(*rates: tuple[Scenario, float]) -> str:
    """Return two runs' rates in the same words whichever of the two is judged.

    Among runs on different numbers of workers, a repeated run is named like the first.
    """
    ordered = sorted(rates, key=lambda pair: (-pair[0].world_size, pair[0].repeat))
    if len({run.world_size for run, _ in rates}) > 1:
        ordered = [(run.with_(repeat=0), rate) for run, rate in ordered]
    return " and ".join(f"{rate:.6g} in {run_names.of(run)}" for run, rate in ordered)
