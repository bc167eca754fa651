"""The samples that each rank of torch's trainers computes in a step, and their totals over ranks.

Every rank derives the same order from seed and epoch, and takes its own part without communication.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.workload_module import Model
from entrenar_py.train.arithmetic import sharding


def global_batch(scenario: Scenario, position: sharding.Position) -> sharding.Ids:
    """Return the sample ids of the step at `position`, over all ranks."""
    visit = sharding.order(scenario.num_samples, scenario.rng("order", position.epoch))
    return sharding.batch(visit, position, scenario.batch_size)


def micro_batches(rank: Rank, ids: sharding.Ids, index: int) -> list[sharding.Ids]:
    """Return rank `index`'s part of a global batch, in micro-batches; some may be empty."""
    local = sharding.cut(ids, rank.world_size)[index]
    return sharding.cut(local, rank.scenario.accumulation)


def total_weight(rank: Rank, model: Model, ids: sharding.Ids) -> float:
    """Return the weight of the global batch, in samples or tokens, by an all-reduce."""
    local = sharding.cut(ids, rank.world_size)[rank.index]
    weight = torch.tensor(model.count(local), device=rank.device)
    dist.all_reduce(weight)
    return float(weight)


def update_buffers(rank: Rank, model: Model, ids: sharding.Ids) -> None:
    """Move the running means towards the mean of the global batch, the same on all ranks."""
    totals = model.statistics(sharding.cut(ids, rank.world_size)[rank.index])
    for total in totals.values():
        dist.all_reduce(total)
    model.move_buffers(totals, len(ids))
