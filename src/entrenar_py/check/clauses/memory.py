"""F-HET-002: each worker's peak memory is within its device's budget and matches the estimate.

Source: distributed-training-v1, F-HET-002.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Memory, Trace
from entrenar_py.shared.verdict import Tally

# An estimate is an upper bound on a worker's growth above its memory before the model was built. An
# estimate of STANDS_OUT_BYTES or more must also be at most SLACK times the growth. A smaller model
# may fit into free memory of the interpreter's allocator, so that its growth can't be seen.
SLACK = 1.5
STANDS_OUT_BYTES = 128 * 2**20
# A device's memory has no interpreter in it.
STANDS_OUT_ON_DEVICE_BYTES = 8 * 2**20


def compare(tally: Tally, trace: Trace) -> None:
    """Compare every rank's peak with its budget, and its growth with the earlier estimate."""
    measured = trace.of(Memory)
    for memory in measured:
        _compare_rank(tally, memory, trace)
    skipped = {one.backend: one.reason for one in trace.of(Attempt) if not one.served}
    for name, reason in skipped.items():
        tally.note(f"not measured: {name} ({reason})")
    world = range(trace.scenario.world_size)
    due = {rank for rank in world if trace.scenario.backend_of(rank) not in skipped}
    ranks = due - {memory.rank for memory in measured}
    if measured and ranks:
        tally.miss(f"the memory of ranks {sorted(ranks)} was not measured")


def _compare_rank(tally: Tally, memory: Memory, trace: Trace) -> None:
    who = f"worker {memory.rank} on {memory.backend}"
    place = evidence.place(trace, memory)
    on_host = memory.backend == "cpu"
    if not on_host and memory.reported_bytes is None:
        tally.note(f"{memory.backend} reports no size of its memory: the budget is the scenario's")
    message = f"{who} peaked at {memory.peak_bytes} bytes, its budget is {memory.budget_bytes}"
    tally.at_most(memory.budget_bytes, memory.peak_bytes, message, **place)
    grown = memory.peak_bytes - memory.baseline_bytes
    stands_out_bytes = STANDS_OUT_BYTES if on_host else STANDS_OUT_ON_DEVICE_BYTES
    stands_out = memory.estimate_bytes >= stands_out_bytes
    least = memory.estimate_bytes / SLACK if stands_out else 0
    tally.check(
        least <= grown <= memory.estimate_bytes,
        f"{who} grew by {grown} bytes, the estimate was {memory.estimate_bytes}",
        expected=f"{least:.0f} to {memory.estimate_bytes}",
        got=str(grown),
        **place,
    )


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan two workers on the CPU, with a model that is large next to the interpreter's memory; and
    one worker on each kind of device, with a model that is large enough there.
    """
    usual: dict[str, Any] = {"workload": "mlp", "world_size": 2, "num_steps": 2}
    host = probes.scenario(
        "memory",
        **usual,
        num_shards=4,
        num_samples=64,
        batch_size=64,
        width=2304,
        optimizer="adamw",
        options={"budget_bytes": 2 * 2**30},
    )
    devices = probes.scenario(
        "memory",
        **usual,
        seed=1,
        num_shards=2,
        num_samples=8,
        batch_size=8,
        width=1024,
        backends=("wgpu", "cuda"),
        options={"budget_bytes": 2**25},
    )
    return [host, devices]


ROWS = (
    Check(
        name="memory",
        id="F-HET-002",
        decides="each worker's peak memory stays within its device's budget, and was foreseen",
        spoken_of="vram memory budget peak",
        judge=probes.judge(compare, "no worker's memory was measured"),
        plan=plan,
        tolerance_kinds=("bytes",),
    ),
)
