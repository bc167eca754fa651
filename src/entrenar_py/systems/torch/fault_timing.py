"""The ranks and micro-batches at which faults strike in trainers over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import sharding


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The division of the work among the ranks of one life (see `ranks`).

    Each rank has `micro_batches` a step. `group_size` consecutive ranks compute one batch together.
    With `in_stages` they form a pipeline, and each has its own parameters.
    """

    micro_batches: int
    group_size: int = 1
    in_stages: bool = False


def place(
    scenario: Scenario, fault: Fault, workers: Sequence[int], arranged: Arrangement
) -> list[Fault]:
    """Return `fault` once for each rank that it strikes, with the rank's index and micro-batch.

    A fault without rank and shard strikes all: it is returned unchanged. A logical shard becomes
    the micro-batch at the same place in its rank's share. Ranks that compute a batch together may
    hold copies: a huge gradient, or a fault at a shard, strikes all. In stages a step is one
    micro-batch; the last stage gets a loss's fault, the tensor's stage (or the first) a gradient's.
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
    """Return the group of ranks that computes logical shard `shard`, and its micro-batch."""
    runs = sharding.runs(range(scenario.num_shards), range(num_groups))
    group, run = next((group, run) for group, run in runs.items() if shard in run)
    return group, (shard - run[0]) * arranged.micro_batches // len(run)


def _in_stages(fault: Fault, members: range) -> range:
    if fault.kind == "non_finite_loss":
        return members[-1:]
    if fault.tensor is None and fault.kind != "huge_gradient":
        return members[:1]
    return members
