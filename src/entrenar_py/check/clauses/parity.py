"""F-DP-005: training with many workers is training with one.

Three comparisons are made where they apply: losses from step 100 on, within the published bound;
losses and gradients of the first steps, within float32 rounding of an independently written
single-device trainer; bits, if the trainer promises equal ones for any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from entrenar_py.check import evidence
from entrenar_py.check.causes import presuppositions, run_comparison
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import controlled, knobs, oracles, plans, same_bits
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing, rounds
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, NUDGED, ORACLE, REPEATED, Traces
from entrenar_py.check.evidence.run_names import Words
from entrenar_py.shared.trace import Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

PUBLISHED_TOLERANCE = 0.01  # relative


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Compare every run with the oracle's, and runs that promise equal bits with each other."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    tolerance = PUBLISHED_TOLERANCE if invariant.tolerance is None else invariant.tolerance
    compare_with_oracle(tally, runs, tolerance)
    same_bits.compare_worker_counts(tally, runs.own)
    return tally.finding(nothing=oracles.missing_model(tally, runs))


def compare_with_oracle(tally: Tally, runs: Traces, tolerance: float | None) -> list[int]:
    """Compare runs with the oracle's run: the first steps within rounding; and if `tolerance` is
    not None, losses from step 100 on within it.

    A user's own trainer, which no oracle can run, is compared with its run on one worker. A run
    with a turned knob is compared with the base. Return the number of averaged gradients compared
    in each run that made a step.
    """
    first = _Followed.of(tally, runs, tolerance)
    second = _Followed()
    if runs.undropped is not None:
        second = _Followed.of(tally, runs.undropped, tolerance)
    for trace in first.masked + second.masked:
        excused = trace.draws_by_shard or second.num_followed or not first.num_followed
        told = oracles.other_masks(trace)
        tally.note(told) if excused else tally.miss(told)
    return first.num_gradients + second.num_gradients + knobs.compare(tally, runs)


@dataclass
class _Followed:
    """The number of runs and gradients compared, and the runs left out since their masks differ."""

    num_followed: int = 0
    num_gradients: list[int] = field(default_factory=list)
    masked: list[Trace] = field(default_factory=list)

    @classmethod
    def of(cls, tally: Tally, runs: Traces, tolerance: float | None) -> _Followed:
        done, model = cls(), oracles.model_of(runs)
        if model is None and runs.base is not None:  # then it is the reason that comes first
            compared = Compared(runs=runs, model=runs.base, trace=runs.base)
            presuppositions.comparable(tally, presuppositions.SAMPLES, compared)
        base = () if runs.base is None else (runs.base,)
        for trace in (*base, *runs.of(ALONE)):
            if model is None or trace is model or not evidence.is_as_trained(trace):
                continue
            plain = Compared(runs=runs, model=model, trace=trace)
            compared, words = controlled.pair(tally, plain)
            is_masked = compared is plain and not oracles.same_masks(model, trace)
            if is_masked and not _is_explained(compared):
                done.masked.append(trace)
                continue
            if not runs.of(ORACLE):
                tally.note("compared with its own run on one worker, which may have the same bug")
            count = _compare(tally, compared, tolerance, words)
            if trace.of(Update):
                done.num_gradients.append(count)
            done.num_followed += 1
        return done


def _is_explained(compared: Compared) -> bool:
    """Return whether a user's runs differ by one equation, which other masks would not leave."""
    own = compared.trace.scenario.workload == "own"
    return own and presuppositions.aligned(compared).explanation is not None


def _compare(tally: Tally, compared: Compared, tolerance: float | None, words: Words) -> int:
    """Compare a run with its model, if it can be compared; return how many gradients were."""
    left = presuppositions.comparable(tally, presuppositions.WITH_ONE_WORKER, compared)
    return (
        0
        if left is None
        else run_comparison.compare(
            tally, left.model, left.trace, tolerance, words, sensitivity=left.sensitivity
        )
    )


ROWS = (
    Check(
        name="parity",
        id="F-DP-005",
        decides="training with many workers is training with one: losses and gradients",
        spoken_of="single-gpu baseline equivalence convergence pytorch full-batch accumulated "
        "stale",
        judge=judge,
        plan=plans.parity,
        explores=True,
        needs=(ALONE, ORACLE, *knobs.TURNED),
        witnesses=(REPEATED, NUDGED, CONTROLLED),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        in_step=True,
        takes_turned=True,
        absent=rounds.unlike_one_worker,
    ),
)
