"""F-TI-001: loss and gradient are weighted by samples or tokens, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.checks import evidence, parity
from entrenar_py.contract import Invariant
from entrenar_py.trace import Trace
from entrenar_py.verdict import Finding, Tally

RELATIVE = 1e-5  # where a contract gives no tolerance: a float32 sum of n terms is off by n 2^-24


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """The mean is over samples or tokens: loss from the shards, gradients from the oracle."""
    tally = Tally(invariant.id)
    kept = evidence.usable(traces, tally)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    for trace in kept:
        _weighted_loss(tally, trace, relative)
    if not parity.compare_with_oracle(tally, kept, tolerance=None):
        tally.miss(
            "the gradient's weighting is unknown: there is no single-device run of the same "
            "training, or gradients were recorded without their values (detail: values)"
        )
    return tally.finding(nothing="no loss with its weight was recorded")


def _weighted_loss(tally: Tally, trace: Trace, relative: float) -> None:
    shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        weight = sum(shard.weight for shard in shards.get(step, ()))
        if not weight:
            continue
        mean = sum(shard.loss_sum for shard in shards[step]) / weight
        if not math.isfinite(mean):  # for F-DP-003 to judge
            continue
        for rank, update in by_rank.items():
            place = {"step": step, "rank": rank, "scenario": trace.scenario.to_dict()}
            tally.equal(weight, update.weight, "the step's weight is not its shards'", **place)
            tally.check(
                abs(update.loss - mean) <= relative * abs(mean),
                "the reported loss is not the weighted mean of the shards' losses",
                expected=repr(mean),
                got=repr(update.loss),
                **place,
            )
