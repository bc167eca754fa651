"""F-DP-005: training with many workers is training with one.

Three strengths, each where it can be kept: the published bound on the loss (from step 100); the
float32 rounding bound on losses and gradients of the first steps against an independently written
single-device trainer; the same bits, from a trainer that promises them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.checks import evidence, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import Finding, Tally

PUBLISHED_FROM_STEP = 100

# Relative L2 distance of two float32 gradients of one batch that were added in different orders.
# Each is within n u |terms| of the exact sum, u = 2^-24, n < 300 terms here, and the terms' norm
# exceeds the sum's by the cancellation among them, at most some tens in these workloads: 2e-5
# to 3e-4 in theory; the largest seen over 1,000 random scenarios is recorded in docs/numerics.md.
GRADIENT_BOUND = 1e-3
# The same for a loss, which is a sum of terms of one sign: no cancellation.
LOSS_BOUND = 1e-4
# Past the first steps rounding differences grow with the trajectory itself, at a rate no static
# bound covers; these steps are left to the published bound.
ROUNDING_STEPS = 4

# What may differ between two runs of the same training.
SPLIT = (
    "system",
    "world_size",
    "num_shards",
    "accumulation",
    "backends",
    "faults",
    "stops",
    "mutant",
)


def oracle(scenario: Scenario) -> Scenario:
    """The plain single-device run of the same training, by the independent trainer."""
    return evidence.plain(
        scenario, system="textbook", world_size=1, accumulation=1, backends=("cpu",)
    )


def family(scenario: Scenario) -> list[Scenario]:
    """The run, the same with one worker, and the oracle."""
    return evidence.distinct(
        [scenario, evidence.plain(scenario, world_size=1, mutant=scenario.mutant), oracle(scenario)]
    )


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every run against the oracle; bitwise against one worker where that is promised."""
    tally = Tally(invariant.id)
    kept = evidence.usable(traces, tally)
    compare_with_oracle(tally, kept, invariant.tolerance or 0.01)
    promised = [trace for trace in kept if "bitwise" in trace.promises]
    same_bits.compare_worker_counts(tally, promised)
    return tally.finding(nothing="no run of the same training with one worker to compare with")


def compare_with_oracle(
    tally: Tally,
    traces: Sequence[Trace],
    tolerance: float | None,
    steps: int = ROUNDING_STEPS,
) -> None:
    """Compares every trace with its oracle's, if that is among them (see `compare`)."""
    for group in evidence.groups(traces, *SPLIT):
        for trace in group:
            model = next((t for t in group if t.scenario == oracle(trace.scenario)), trace)
            if trace is model:
                continue
            if trace.scenario.dropout:
                tally.note("not compared with a single device, whose dropout draws other masks")
                continue
            compare(tally, model, trace, tolerance, steps)


def compare(
    tally: Tally,
    model: Trace,
    trace: Trace,
    tolerance: float | None,
    steps: int = ROUNDING_STEPS,
) -> None:
    """Compares `trace` with the oracle's `model`: the first `steps` within rounding, and from the
    published step on within `tolerance`, where one is given.
    """
    expected = evidence.updates(model)
    # Below this a loss is what is left of rounding once the first loss is learned away.
    floor = 2.0**-20 * abs(evidence.any_rank(expected[0]).loss) if 0 in expected else 0.0
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in expected:
            tally.miss(f"the single-device run has no step {step}")
            continue
        one = evidence.any_rank(expected[step])
        for rank, update in by_rank.items():
            place = {"step": step, "rank": rank, "scenario": trace.scenario.to_dict()}
            allowed = LOSS_BOUND if step < steps else None
            if step >= PUBLISHED_FROM_STEP:
                allowed = tolerance
            if not math.isfinite(one.loss):
                tally.miss(f"the single device's loss of step {step} is not finite")
            elif allowed is not None:
                tally.check(
                    abs(update.loss - one.loss) <= allowed * abs(one.loss) + floor,
                    f"loss with {trace.scenario.world_size} workers is off by more than "
                    f"{allowed:.2g} of the single device's",
                    expected=repr(one.loss),
                    got=repr(update.loss),
                    **place,
                )
            if step < steps:
                message = "averaged gradient is not the single device's"
                evidence.compare_close(
                    tally, one.gradient, update.gradient, GRADIENT_BOUND, message, **place
                )
                if trace.scenario.optimizer != "adamw":  # whose steps are +-rate where gradients
                    message = "weights after the step are not the single device's"  # are noise
                    evidence.compare_close(
                        tally, one.weights, update.weights, GRADIENT_BOUND, message, **place
                    )
    missing = sorted(set(expected) - set(evidence.updates(trace)))
    if missing and model.end.status == "halted":
        tally.miss(f"the single-device run halted: {model.end.reason}")
        return
    tally.check(
        not missing,
        f"steps {missing[:5]} were never made",
        step=missing[0] if missing else None,
        scenario=trace.scenario.to_dict(),
    )
