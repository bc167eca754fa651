"""torch's fully_shard (FSDP2), as it is to be used: gloo on the CPU, NCCL on GPUs.

Each rank keeps a piece of every parameter, of its gradient and of the optimizer's state. Batches
may be of any size, as with `ddp`: a rank's loss counts what it counts in the global batch, and a
NaN stops every rank before it is reduced. A checkpoint is of the whole model, so that another
number of ranks can go on from it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import entrenar_py
from entrenar_py import trace
from entrenar_py.errors import UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.systems.torch import ranks, workload_module
from entrenar_py.systems.torch.batches import (
    global_batch,
    micro_batches,
    total_weight,
    update_buffers,
)
from entrenar_py.systems.torch.finite_guard import FiniteGuard, NotFinite
from entrenar_py.systems.torch.ranks import Rank, write
from entrenar_py.training import sharding

# What is computed in; parameters, their gradients once reduced, and the optimizer are float32.
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
# On rank 0's CPU alone; each rank takes its pieces of what rank 0 reads.
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Sharded(FSDPModule, workload_module.Model):
    """The model as `fully_shard` makes it."""


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says, each rank a process of its own."""
    return ranks.run(scenario)


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite where that is why training stops.
    """
    scenario = rank.scenario
    torch.manual_seed(rank.seed)  # dropout's: another on every rank
    model = shard(rank, workload_module.Model(scenario).to(rank.device))
    optimizer = workload_module.optimizer_of(scenario, model)  # of the pieces: after sharding
    scheduler = workload_module.scheduler_of(scenario, optimizer)
    position, step = sharding.Position(), 0
    if rank.resumes:
        position, step = load(rank, model, optimizer, scheduler)
    elif rank.saves:
        save(rank, model, optimizer, scheduler, position, step)
    obs = entrenar_py.observe(model, optimizer, step=step)
    guard = FiniteGuard(unsharded(model))
    while step < rank.until:
        ids = global_batch(scenario, position)
        try:
            accumulate(rank, model, guard, obs, ids, position.epoch)
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


def shard(rank: Rank, model: workload_module.Model) -> Sharded:
    """`model` in pieces, one of each parameter on every rank.

    All ranks made the same model: `fully_shard` takes what each has, and compares nothing. Where a
    model has layers that are called, each is sharded before the whole: then one at a time is held.
    """
    mesh = init_device_mesh(rank.device.type, (rank.world_size,), mesh_dim_names=("fsdp",))
    asked = rank.scenario.options.get("precision", "float32")
    if asked not in PRECISIONS:
        raise UsageError(f"option precision={asked!r}: allowed are {', '.join(PRECISIONS)}")
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[asked], reduce_dtype=torch.float32)
    return cast("Sharded", fully_shard(model, mesh=mesh, mp_policy=policy))


def unsharded(model: Sharded) -> dict[str, nn.Parameter]:
    """The whole trainable parameters, which hold values while a rank computes, and get its own
    gradient before that is reduced.
    """
    model.unshard()
    whole = {name: p for name, p in model.named_parameters() if p.requires_grad}
    model.reshard()
    return whole


def accumulate(
    rank: Rank,
    model: Sharded,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    ids: sharding.Ids,
    epoch: int,
) -> None:
    """Leaves each rank's piece of the global batch's mean gradient in `.grad`."""
    model.zero_grad()
    weight = total_weight(rank, model, ids)
    parts = micro_batches(rank, ids, rank.index)
    for number, part in enumerate(parts):
        # Until the last one a rank keeps its whole gradient, as it would without sharding: less to
        # send. Reducing every one holds less, and is right as well.
        model.set_requires_gradient_sync(number == len(parts) - 1)
        obs.samples(part, epoch=epoch)
        # Who has no samples takes part all the same, with a loss that counts nothing.
        loss = model(part) if part else model(ids[:1]) * 0
        guard.begin(loss)
        own = model.count(part)
        obs.loss(loss.detach() / max(own, 1.0), own)
        (loss.float() * rank.world_size / weight).backward()  # averaged over ranks, it is the mean


def clip(scenario: Scenario, model: nn.Module) -> None:
    """Clips the reduced gradient, in place, by the float64 norm of all its pieces: a rank's own
    piece has another norm, and in float32 squares overflow.
    """
    if scenario.clip_norm is not None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        squares = [p.grad.double().square().sum() for p in trainable if p.grad is not None]
        total = torch.stack(squares).sum()
        assert isinstance(total, DTensor), "of pieces: a term on each rank"
        norm = total.full_tensor().sqrt()
        nn.utils.clip_grads_with_norm_(trainable, scenario.clip_norm, norm)


# --- checkpoints ------------------------------------------------------------------------------


def save(
    rank: Rank,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    position: sharding.Position,
    step: int,
) -> None:
    """Rank 0 writes one file with the whole model and all else that a resume needs.

    Of models that no rank can hold, `torch.distributed.checkpoint.save` writes each rank's pieces.
    """
    random = rank.all_random_states()
    # Asked for a state that there is not, torch makes a step with gradients of zero to have one,
    # and Adam counts it: there is none before the first step, and SGD never has any.
    kept = None
    if optimizer.state:
        kept = state_dict.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    content: dict[str, Any] = {
        "model": state_dict.get_model_state_dict(model, options=WHOLE),
        "optimizer": kept,
        "scheduler": scheduler.state_dict(),
        "random": random,
        "epoch": position.epoch,
        "offset": position.offset,
        "step": step,
    }
    if rank.index == 0:
        write(rank.checkpoint, content)
    dist.barrier()


def load(
    rank: Rank, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler
) -> tuple[sharding.Position, int]:
    """Return where to go on, and the next step; a rank that the checkpoint lacks draws its own."""
    saved = torch.load(rank.checkpoint, map_location="cpu", mmap=True, weights_only=True)
    state_dict.set_model_state_dict(model, saved["model"], options=FROM_RANK_0)
    if saved["optimizer"]:
        state_dict.set_optimizer_state_dict(
            model, optimizer, saved["optimizer"], options=FROM_RANK_0
        )
    scheduler.load_state_dict(saved["scheduler"])
    for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = learning_rate  # also where there was no state to bring it
    if rank.worker in saved["random"]:
        rank.restore_random(saved["random"][rank.worker])
    return sharding.Position(saved["epoch"], saved["offset"]), saved["step"]
