"""F-HET-002: each worker's peak memory stays within its device's budget, and was foreseen."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.checks import evidence
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Memory, Trace
from entrenar_py.verdict import Finding, Tally

# An estimate is worth something if it bounds the peak and is no more than this many times it
# (both above what the process held before it built anything).
SLACK = 2.0


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Peak against budget, and against the estimate made beforehand."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for memory in trace.of(Memory):
            grown = memory.peak_bytes - memory.baseline_bytes
            place = {"rank": memory.rank, "scenario": trace.scenario.to_dict()}
            tally.check(
                memory.peak_bytes <= memory.budget_bytes,
                f"worker {memory.rank} on {memory.backend} peaked at {memory.peak_bytes} bytes, "
                f"its budget is {memory.budget_bytes}",
                expected=f"<= {memory.budget_bytes}",
                got=str(memory.peak_bytes),
                **place,
            )
            tally.check(
                grown <= memory.estimate_bytes <= SLACK * grown,
                f"worker {memory.rank} grew by {grown} bytes, the estimate was "
                f"{memory.estimate_bytes}",
                expected=f"{memory.estimate_bytes / SLACK:.0f} to {memory.estimate_bytes}",
                got=str(grown),
                **place,
            )
    return tally.finding(nothing="no worker's memory was measured")


def plan(invariant: Invariant) -> list[Scenario]:
    """One worker of two, with a model large enough to stand out from the interpreter."""
    return [
        Scenario(
            system="memory",
            workload="mlp",
            world_size=2,
            seed=0,
            num_shards=4,
            num_samples=64,
            batch_size=64,
            num_steps=2,
            width=2048,
            optimizer="adamw",
            options={"budget_bytes": 2 * 2**30},
        )
    ]
