"""The places at which faults strike in trainers that torch.distributed carries: at which ranks of a
life, in which of their micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.training import sharding


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The division of the work among the ranks of one life.

    Each has `micro_batches` a step; `group_size` of them, one after the other, compute one batch:
    together, or `in_stages`, each with parameters of its own.
    """

    micro_batches: int
    group_size: int = 1
    in_stages: bool = False


def place(
    scenario: Scenario, fault: Fault, workers: Sequence[int], arranged: Arrangement
) -> list[Fault]:
    """`fault` where it strikes in this life: in ranks, and for a logical shard in the micro-batch
    that stands where it does in its rank's share: both are cut in order.

    What is added to a batch's gradient is added by all who compute it: they may hold copies. In
    stages a gradient is struck where its tensor is, by default in the first stage, a loss in the
    last, and a step is one micro-batch.
    """
    if fault.kind == "join" or (fault.rank is not None and fault.rank not in workers):
        return []
    rank = None if fault.rank is None else workers.index(fault.rank)
    if fault.kind == "leave":
        return [replace(fault, rank=rank)]
    size, micro = arranged.group_size, None
    if fault.shard is not None:
        group, micro = _of_shard(scenario, fault.shard, len(workers) // size, arranged)
    elif rank is not None:
        group = rank // size
    else:
        return [fault]
    members = range(group * size, (group + 1) * size)
    if rank is not None and rank not in members:
        return []
    if arranged.in_stages and size > 1:
        members, micro = _in_stages(fault, members), None
    elif rank is not None and fault.kind != "huge_gradient":
        members = range(rank, rank + 1)
    return [replace(fault, rank=member, shard=micro) for member in members]


def _of_shard(
    scenario: Scenario, shard: int, num_groups: int, arranged: Arrangement
) -> tuple[int, int]:
    """Return the group of ranks that has logical shard `shard`, and in which micro-batch."""
    runs = sharding.runs(range(scenario.num_shards), range(num_groups))
    group, run = next((group, run) for group, run in runs.items() if shard in run)
    return group, (shard - run[0]) * arranged.micro_batches // len(run)


def _in_stages(fault: Fault, members: range) -> range:
    if fault.kind == "non_finite_loss":
        return members[-1:]
    if fault.tensor is None and fault.kind != "huge_gradient":
        return members[:1]
    return members
