"""Which run on a single device a training is compared with; judges nothing.

The independent trainer's, and of somebody's own trainer, which that can't run, its own with one
worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.checks import evidence, missing
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Trace

ORACLE = "textbook"  # the independent trainer
# whose ranks draw their own dropout masks
MASKS_PER_RANK = (
    *(ORACLE, "ddp", "fsdp", "local_sgd"),
    *("tensor_parallel", "sequence_parallel", "pipeline_parallel"),
)

# whose masks are keyed by shard, and drawn from torch's generators, as no single device draws them
OTHER_MASKS = ("ddp_canonical",)

# What may differ between two runs of the same training.
SPLIT = (
    "system",
    "world_size",
    "num_shards",
    "accumulation",
    "backends",
    "faults",
    "stops",
    "repeat",
    "mutant",
    "options",
)


def oracle(scenario: Scenario) -> Scenario:
    """The plain single-device run of the same training, by the independent trainer."""
    single = {"system": ORACLE, "world_size": 1, "accumulation": 1, "backends": ("cpu",)}
    return evidence.plain(scenario, **single, options={})


def family(scenario: Scenario) -> list[Scenario]:
    """The run, the same with one worker, and the oracle.

    Where masks are drawn per rank, one worker is another run, and so is the oracle where they are
    drawn from other generators: then all three without dropout too.
    """
    model = oracle(scenario)
    alone = evidence.plain(scenario, world_size=1, mutant=scenario.mutant)
    runs = [scenario, alone, model]
    apart = scenario.system in (*MASKS_PER_RANK, *OTHER_MASKS)
    if scenario.dropout and apart and scenario != model:
        runs += family(scenario.with_(dropout=0.0))
    return evidence.distinct(runs)


def missing_model(traces: Sequence[Trace]) -> str:
    """Why `traces` hold no run on a single device to compare with, and what to record; empty if
    they do.
    """
    for group in evidence.groups(traces, *SPLIT):
        for trace in group:
            model = model_of(trace, group)
            if model is not None and same_masks(model, trace):
                return ""
            if model is not None:
                return other_masks(trace) + _instead(trace)
    others = [trace for trace in traces if trace.scenario != oracle(trace.scenario)]
    why = "no run of the same training on one worker to compare with: record one with world_size=1"
    if others and all(trace.scenario.world_size == 1 for trace in others):
        why = "no run on several workers: record the same training with a larger world_size"
    nearly = f"{why}, and all else equal{missing.but_for(traces, family)}"
    return _other_batches(traces) or nearly


def _other_batches(traces: Sequence[Trace]) -> str:
    """Why one worker's run of somebody's own trainer is another training, where its batch is; else
    empty. Most scripts are told the batch of each worker.
    """
    own = [trace.scenario for trace in traces if trace.scenario.workload == "own"]
    alone = next((one for one in own if one.world_size == 1), None)
    several = next((one for one in own if one.world_size > 1), None)
    if alone is None or several is None or alone.batch_size == several.batch_size:
        return ""
    return (
        f"one worker trains on batches of {alone.batch_size} samples, {several.world_size} on "
        f"{several.batch_size}: divide the global batch by the number of workers"
    )


def model_of(trace: Trace, group: Sequence[Trace]) -> Trace | None:
    """What `trace` is compared with; None for a model itself and where there is none."""
    scenario = trace.scenario
    oracles = [other for other in group if other.scenario == oracle(scenario)]
    if oracles:
        return None if trace in oracles else oracles[0]
    alone = [t for t in group if (t.scenario.system, t.scenario.world_size) == (scenario.system, 1)]
    return None if not alone or trace in alone else alone[0]


def same_masks(model: Trace, trace: Trace) -> bool:
    """Whether dropout, if any, drops in `trace` what it drops in the model.

    A single device draws what its logical shards would draw; who promises bits keys its dropout by
    shard too, and but for OTHER_MASKS draws the same. Of others the first stream tells, if it was
    recorded. Micro-batches draw in another order. Batch normalisation
    by each rank's own samples is like a mask: another one on one worker.
    """
    if trace.traits.batch_norm:
        return False
    if not trace.scenario.dropout:
        return True
    if trace.scenario.accumulation > 1:
        return False
    mine, theirs = ({s.draws for s in one.of(Shard)[:1]} for one in (trace, model))
    known = trace.scenario.workload != "own" or None not in mine
    by_shard = trace.draws_by_shard and trace.scenario.system not in OTHER_MASKS
    return by_shard or (mine == theirs and known)


def other_masks(trace: Trace) -> str:
    """Why a trace under dropout, or batch normalisation, is not compared with a single device."""
    if trace.traits.batch_norm:
        return (
            "batch normalisation is by each rank's own samples: on one worker it is another run, "
            "and was not compared"
        )
    if trace.draws_by_shard:
        return "not compared with a single device, whose dropout draws other masks"
    system = trace.scenario.system
    if all(shard.draws is None for shard in trace.of(Shard)):
        return f"under dropout {system} was not compared with one worker, since no Shard has draws"
    return (
        f"under dropout {system} draws its masks per rank: on one worker it is another run, and "
        "was not compared"
    )


def _instead(trace: Trace) -> str:
    if trace.traits.batch_norm:
        return ": use SyncBatchNorm, or leave its layers in eval()"
    return ": use dropout 0 in both runs"


def without_dropout(scenario: Scenario) -> Scenario:
    """The same training without dropout, however much of it is recorded."""
    return scenario.with_(dropout=0.0, detail="digests")
