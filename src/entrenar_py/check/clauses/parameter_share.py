"""F-PAR-006: ranks that share a model's parameters hold little more than their share of them.

The bytes are those of the recorded pieces. They are not measured, so allocators and activations
don't count. Source: parallelism-v1, F-PAR-006.
"""

from __future__ import annotations

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Held, Start
from entrenar_py.shared.verdict import Finding, Tally

# The tolerance if a contract gives none. Norms and the first halves of adapters are on all ranks:
# 3 % of the largest workload.
RELATIVE = 0.05


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Compare each rank's bytes with the model's, divided by the number of ranks that share it."""
    tally = Tally(invariant.id)
    relative = RELATIVE if invariant.tolerance is None else invariant.tolerance
    for trace in evidence.usable(traces, tally):
        shares = trace.of(Held)
        for share in shares:
            most = share.whole_bytes * (1 + relative) / share.num_parts
            message = (
                f"rank {share.rank} holds {share.held_bytes} bytes of parameters, "
                f"1/{share.num_parts} of the model is {share.whole_bytes / share.num_parts:.0f}"
            )
            place = evidence.place(trace, share)
            tally.at_most(most, share.held_bytes, message, form=".0f", **place)
        silent = {start.rank for start in trace.of(Start)} - {share.rank for share in shares}
        if shares and silent:
            tally.miss(f"how much ranks {sorted(silent)} hold was not recorded")
    return tally.finding(
        nothing="no run spread its parameters over ranks: record one with layout tp, dp_shard or "
        "fsdp and a Held of each rank"
    )


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan both trainers that cut each layer, with all parameters trained or with adapters only."""
    sizes = {"world_size": 2, "num_samples": 6, "batch_size": 6, "num_steps": 1}
    return [
        probes.scenario(system, workload=workload, **sizes)
        for system in ("tensor_parallel", "sequence_parallel")
        for workload in ("decoder", "decoder_full")
    ]


ROWS = (
    Check(
        name="holdings",
        id="F-PAR-006",
        decides="ranks that share a model's parameters hold little more than their share of them",
        spoken_of="tensor-parallel sequence-parallel memory-share",
        judge=judge,
        plan=plan,
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        not_of_commands="which tensors a script means to hold whole on every rank is unknown",
    ),
)
