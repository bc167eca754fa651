"""DistributedDataParallel with the canonical all-reduce: the same bits for 1, 2, 4, 8 ... workers.

It differs from `ddp` in the loop over micro-batches. The micro-batches are the leaves of one tree
over the global batch, and dropout in a leaf depends on its place in the tree, not on the rank.
"""

from __future__ import annotations

import os

import torch
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import ddp, modules, ranks
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite, global_batch, update_buffers
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.canonical.reducer import Reducer


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    share = num_leaves(scenario) // scenario.world_size
    return ranks.run(scenario, micro_batches=share, promises=("bitwise", "draws"))


def num_leaves(scenario: Scenario) -> int:
    """Return the number of micro-batches in a global batch, over all ranks."""
    return scenario.num_shards * scenario.accumulation


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite if a loss or a gradient is not finite.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # must be set before the first product
    torch.use_deterministic_algorithms(True)
    scenario = rank.scenario
    model = modules.Model(scenario).to(rank.device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    reducer = entrenar_py.canonical_all_reduce(wrapped, micro_batches=num_leaves(scenario))
    optimizer = modules.optimizer_of(scenario, model)
    scheduler = modules.scheduler_of(scenario, optimizer)
    position, step = sharding.Position(), 0
    if rank.resumes:
        position, step = ddp.load(rank, model, optimizer, scheduler)
    elif rank.saves:
        ddp.save(rank, model, optimizer, scheduler, position, step)
    obs = entrenar_py.observe(wrapped, optimizer, step=step)
    guard = FiniteGuard({n: p for n, p in model.named_parameters() if p.requires_grad})
    while step < rank.until:
        ids = global_batch(scenario, position)
        leaves = sharding.cut(ids, num_leaves(scenario))
        try:
            accumulate(rank, reducer, wrapped, guard, obs, step, position.epoch, leaves)
            guard.agree()
        except NotFinite as error:
            leaf = leaves[error.rank * len(reducer.shards) + error.micro]
            obs.halted(str(error), ids=leaf, **error.place)
            raise
        obs.reduced()
        update_buffers(rank, model, ids)
        ddp.clip(scenario, model)
        optimizer.step()
        scheduler.step()
        position = sharding.advance(position, len(ids), scenario.num_samples)
        step += 1
        if rank.saves:
            ddp.save(rank, model, optimizer, scheduler, position, step)
    obs.close()


def accumulate(
    rank: Rank,
    reducer: Reducer,
    wrapped: DistributedDataParallel,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    step: int,
    epoch: int,
    leaves: list[sharding.Ids],
) -> None:
    """Leave the mean gradient of the global batch, added along the tree, in every `.grad`."""
    total = sum(wrapped.module.count(leaf) for leaf in leaves)
    own = [leaves[shard] for shard in reducer.shards]
    for leaf in reducer.fold(own):
        torch.manual_seed(seed(rank.scenario, step, reducer.shard))
        obs.samples(leaf, epoch=epoch)
        # A leaf without samples has a loss of zero, on whichever rank it is computed.
        loss = wrapped(leaf) if leaf else wrapped(leaves[0][:1]) * 0
        guard.begin(loss)
        count = wrapped.module.count(leaf)
        obs.loss(loss.detach() / max(count, 1.0), count)
        (loss * len(leaves) / total).backward()  # the reducer divides by the number of leaves


def seed(scenario: Scenario, step: int, shard: int) -> int:
    """Return the seed of dropout in a leaf, which is the same on every rank."""
    return int(scenario.rng("torch", step, shard).integers(2**63))
