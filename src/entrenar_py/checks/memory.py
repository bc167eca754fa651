"""F-HET-002: each worker's peak memory stays within its device's budget, and was foreseen.

Source: distributed-training-v1, F-HET-002.
"""

from __future__ import annotations

from entrenar_py.checks import evidence, missing
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import Traces
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Attempt, Memory
from entrenar_py.verdict import Finding, Tally

# An estimate bounds what a worker grows by above what it held before it built anything. From
# STANDS_OUT_BYTES on it is also no more than SLACK times the growth; below, the interpreter's
# allocator, whose free memory a small model fits into, decides what growth can be seen.
SLACK = 1.5
STANDS_OUT_BYTES = 128 * 2**20
# On a device there is nothing else.
STANDS_OUT_ON_DEVICE_BYTES = 8 * 2**20


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Every rank's peak against its budget, and its growth against the estimate made beforehand."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        measured = trace.of(Memory)
        for memory in measured:
            _judge_rank(tally, memory, trace.scenario)
        skipped = {one.backend: one.reason for one in trace.of(Attempt) if not one.served}
        for name, reason in skipped.items():
            tally.note(f"not measured: {name} ({reason})")
        world = range(trace.scenario.world_size)
        due = {rank for rank in world if trace.scenario.backend_of(rank) not in skipped}
        ranks = due - {memory.rank for memory in measured}
        if measured and ranks:
            tally.miss(f"the memory of ranks {sorted(ranks)} was not measured")
    return tally.finding(nothing=missing.probed(invariant, "no worker's memory was measured"))


def _judge_rank(tally: Tally, memory: Memory, scenario: Scenario) -> None:
    who = f"worker {memory.rank} on {memory.backend}"
    if memory.backend != "cpu" and memory.reported_bytes is None:
        tally.note(f"{memory.backend} reports no size of its memory: the budget is the scenario's")
    tally.check(
        memory.peak_bytes <= memory.budget_bytes,
        f"{who} peaked at {memory.peak_bytes} bytes, its budget is {memory.budget_bytes}",
        rank=memory.rank,
        expected=f"<= {memory.budget_bytes}",
        got=str(memory.peak_bytes),
        scenario=scenario,
    )
    grown = memory.peak_bytes - memory.baseline_bytes
    on_host = memory.backend == "cpu"
    stands_out = memory.estimate_bytes >= (
        STANDS_OUT_BYTES if on_host else STANDS_OUT_ON_DEVICE_BYTES
    )
    least = memory.estimate_bytes / SLACK if stands_out else 0
    tally.check(
        least <= grown <= memory.estimate_bytes,
        f"{who} grew by {grown} bytes, the estimate was {memory.estimate_bytes}",
        rank=memory.rank,
        expected=f"{least:.0f} to {memory.estimate_bytes}",
        got=str(grown),
        scenario=scenario,
    )


def plan(invariant: Invariant) -> list[Scenario]:
    """Both workers of two, with a model large enough to stand out from the interpreter; and one on
    each kind of device, with one that stands out there.
    """
    devices = Scenario(
        system="memory",
        workload="mlp",
        world_size=2,
        seed=1,
        num_shards=2,
        num_samples=8,
        batch_size=8,
        num_steps=2,
        width=1024,
        backends=("wgpu", "cuda"),
        options={"budget_bytes": 2**25},
    )
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
            width=2304,
            optimizer="adamw",
            options={"budget_bytes": 2 * 2**30},
        ),
        devices,
    ]


ROWS = (
    Check(
        name="memory",
        id="F-HET-002",
        decides="each worker's peak memory stays within its device's budget, and was foreseen",
        judge=judge,
        plan=plan,
        explores=False,
        tolerance_kinds=("bytes",),
    ),
)
