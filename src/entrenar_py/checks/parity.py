"""F-DP-005: training with many workers is training with one.

Three strengths, each where it can be kept: the published bound on the loss (from step 100); the
float32 rounding bound on losses and gradients of the first steps against an independently written
single-device trainer; the same bits, from a trainer that promises them.
"""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.checks import evidence, knob_pairs, oracles, run_comparison, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace, Update
from entrenar_py.verdict import Finding, Tally

PUBLISHED_TOLERANCE = 0.01  # relative


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every run against the oracle; bitwise against one worker where that is promised."""
    tally = Tally(invariant.id)
    kept = evidence.usable(traces, tally)
    tolerance = PUBLISHED_TOLERANCE if invariant.tolerance is None else invariant.tolerance
    compare_with_oracle(tally, kept, tolerance)
    promised = [trace for trace in kept if "bitwise" in trace.promises]
    same_bits.compare_worker_counts(tally, promised)
    return tally.finding(nothing=oracles.missing_model(kept))


def compare_with_oracle(
    tally: Tally, traces: Sequence[Trace], tolerance: float | None
) -> list[int]:
    """Compares every trace with its oracle's, if that is among them: the first steps within
    rounding, and from the published step on within `tolerance`, where one is given.

    Of somebody's own trainer, which no oracle can run, the model is its run with one worker.
    And every one with a knob turned with the one without. Of each trace that was compared and made
    a step, how many averaged gradients were.
    """
    num_gradients: list[int] = []
    followed: set[Scenario] = set()
    masked: list[Trace] = []
    usual = [trace for trace in traces if knob_pairs.pair_of(trace.scenario) is None]
    for group in evidence.groups(usual, *oracles.SPLIT):
        for trace in group:
            model = oracles.model_of(trace, group)
            if model is None:
                continue
            if not oracles.same_masks(model, trace):
                masked.append(trace)
                continue
            if model.scenario != oracles.oracle(trace.scenario):
                tally.note("compared with its own run on one worker, which may have the same bug")
            count = run_comparison.compare(tally, model, trace, tolerance)
            if trace.of(Update):
                num_gradients.append(count)
            followed.add(oracles.without_dropout(trace.scenario))
    for trace in masked:
        excused = trace.draws_by_shard or oracles.without_dropout(trace.scenario) in followed
        if excused or not followed:
            tally.note(oracles.other_masks(trace))
        else:
            tally.miss(oracles.other_masks(trace))
    return num_gradients + knob_pairs.compare(tally, traces)
