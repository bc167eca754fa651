"""A correct use of torch's DistributedDataParallel: gloo on the CPU, NCCL on GPUs.

The batch and the number of ranks may have any size: each rank's loss is weighted by its samples or
tokens in the global batch. Only the last micro-batch is synchronised. A NaN is detected before it
is reduced, and stops all ranks before the step. A run resumes exactly from its checkpoint.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import modules, ranks
from entrenar_py.systems.torch.ranks import Rank, write
from entrenar_py.systems.torch.steps import (
    FiniteGuard,
    NotFinite,
    global_batch,
    micro_batches,
    total_weight,
    update_buffers,
)
from entrenar_py.train.arithmetic import sharding


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    return ranks.run(scenario)


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite if a loss or a gradient is not finite.
    """
    scenario = rank.scenario
    torch.manual_seed(rank.seed)  # for dropout, different on every rank
    model = modules.Model(scenario).to(rank.device)
    # With find_unused_parameters DDP doesn't rebuild its buckets after a process's first step. With
    # three ranks or more, a rebuild changes the order of sums: a resume would change the bits.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    optimizer = modules.optimizer_of(scenario, model)
    scheduler = modules.scheduler_of(scenario, optimizer)
    position, step = sharding.Position(), 0
    if rank.resumes:
        position, step = load(rank, model, optimizer, scheduler)
    elif rank.saves:
        save(rank, model, optimizer, scheduler, position, step)
    obs = entrenar_py.observe(ddp, optimizer, step=step)
    guard = FiniteGuard({n: p for n, p in model.named_parameters() if p.requires_grad})
    while step < rank.until:
        ids = global_batch(scenario, position)
        try:
            accumulate(rank, ddp, guard, obs, ids, position.epoch)
            guard.agree()
        except NotFinite as error:
            there = micro_batches(rank, ids, error.rank)[error.micro]
            obs.halted(str(error), ids=there, **error.place)
            raise
        obs.reduced()
        update_buffers(rank, model, ids)
        clip(scenario, model)
        optimizer.step()
        scheduler.step()
        position = sharding.advance(position, len(ids), scenario.num_samples)
        step += 1
        if rank.saves:
            save(rank, model, optimizer, scheduler, position, step)
    obs.close()


def accumulate(
    rank: Rank,
    ddp: DistributedDataParallel,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    ids: sharding.Ids,
    epoch: int,
) -> None:
    """Leave the mean gradient of the global batch in every rank's `.grad`."""
    ddp.zero_grad()
    weight = total_weight(rank, ddp.module, ids)
    parts = micro_batches(rank, ids, rank.index)
    for number, part in enumerate(parts):
        obs.samples(part, epoch=epoch)
        with nullcontext() if number == len(parts) - 1 else ddp.no_sync():
            # A rank without samples takes part, too, with a loss of zero.
            loss = ddp(part) if part else ddp(ids[:1]) * 0
            guard.begin(loss)
            own = ddp.module.count(part)
            obs.loss(loss.detach() / max(own, 1.0), own)
            (loss * rank.world_size / weight).backward()  # DDP divides by world_size


def clip(scenario: Scenario, model: nn.Module) -> None:
    """Clip the reduced gradient, in place, by its float64 norm: float32 squares may overflow."""
    if scenario.clip_norm is not None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        squares = [p.grad.double().square().sum() for p in trainable if p.grad is not None]
        norm = torch.stack(squares).sum().sqrt()
        nn.utils.clip_grads_with_norm_(trainable, scenario.clip_norm, norm)


# --- checkpoints ------------------------------------------------------------------------------


def save(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    position: sharding.Position,
    step: int,
) -> None:
    """Write the state for a resume, with every rank's random state, to one file on rank 0."""
    random = rank.all_random_states()
    if rank.index == 0:
        content: dict[str, Any] = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": random,
            "epoch": position.epoch,
            "offset": position.offset,
            "step": step,
        }
        write(rank.checkpoint, content)
    dist.barrier()


def load(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
) -> tuple[sharding.Position, int]:
    """Restore the checkpoint's state; return the position and the next step.

    The random state is restored if this worker saved one.
    """
    saved = torch.load(rank.checkpoint, map_location=rank.device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    if rank.worker in saved["random"]:
        rank.restore_random(saved["random"][rank.worker])
    return sharding.Position(saved["epoch"], saved["offset"]), saved["step"]
