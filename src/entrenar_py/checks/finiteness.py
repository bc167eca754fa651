"""F-DP-003: finite gradients average to a finite gradient; NaN or Inf halts before any update."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.trace import Halt, Injected, Saved, Shard, Trace, Update
from entrenar_py.verdict import Finding, Tally


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Runs with a non-finite value must halt at it; all others must stay finite and never halt."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        culprits = _culprits(trace)
        if culprits:
            _halts(tally, trace, culprits)
        else:
            _stays_finite(tally, trace)
    return tally.finding(nothing="no update and no halt was recorded")


def _culprits(trace: Trace) -> list[Shard] | list[Injected]:
    """The non-finite shards of the first step with any, or the faults that no shard admits to."""
    bad = [shard for shard in trace.of(Shard) if not shard.finite]
    planted = [
        event
        for event in trace.of(Injected)
        if str(event.fault.get("kind")).startswith("non_finite_")
    ]
    steps = [shard.step for shard in bad] + [event.step or 0 for event in planted]
    first = min(steps, default=0)
    shards = [shard for shard in bad if shard.step == first]
    return shards or [event for event in planted if (event.step or 0) == first]


def _stays_finite(tally: Tally, trace: Trace) -> None:
    scenario = trace.scenario.to_dict()
    for halt in trace.of(Halt):
        tally.check(
            False,
            f"halted though every shard was finite: {halt.reason}",
            step=halt.step,
            rank=halt.rank,
            shard=halt.shard,
            tensor=halt.tensor,
            scenario=scenario,
        )
    for update in trace.of(Update):
        tally.check(
            update.finite and math.isfinite(update.loss) and _finite_norm(update),
            f"finite shards gave a non-finite update (loss {update.loss}, gradient norm "
            f"{update.grad_norm})",
            step=update.step,
            rank=update.rank,
            scenario=scenario,
        )


def _finite_norm(update: Update) -> bool:
    return update.grad_norm is None or math.isfinite(update.grad_norm)


def _halts(tally: Tally, trace: Trace, culprits: Sequence[Shard] | Sequence[Injected]) -> None:
    named = {(halt.step, halt.rank, halt.shard) for halt in trace.of(Halt)[:1]}
    # Of several shards of one step, the one that the halt names.
    culprit = next((c for c in culprits if (c.step, c.rank, c.shard) in named), culprits[0])
    step = culprit.step or 0
    scenario = trace.scenario.to_dict()
    where = f"rank {culprit.rank}, step {step}, shard {culprit.shard}"
    place = {"step": step, "rank": culprit.rank, "shard": culprit.shard, "scenario": scenario}
    for update in trace.of(Update):
        if update.step >= step:
            tally.check(
                False,
                f"rank {update.rank} updated in step {update.step} after a non-finite value at "
                f"{where}",
                **place,
            )
        else:
            tally.check(
                math.isfinite(update.loss) and _finite_norm(update),
                f"finite shards gave a non-finite average (loss {update.loss}, gradient norm "
                f"{update.grad_norm})",
                step=update.step,
                rank=update.rank,
                scenario=scenario,
            )
    for saved in trace.of(Saved):
        tally.check(saved.step <= step, f"a checkpoint was written after {where}", **place)
    halts = trace.of(Halt)
    if not tally.check(
        bool(halts), f"training went on after a non-finite value at {where}", **place
    ):
        return
    halt = halts[0]
    expected, got = (step, culprit.rank, culprit.shard), (halt.step, halt.rank, halt.shard)
    tally.equal(expected, got, "the halt names another place", **place)
    if isinstance(culprit, Shard):
        tally.equal(culprit.ids, halt.ids, "the halt names other samples", **place)
