"""A correct use of torch's fully_shard (FSDP2): gloo on the CPU, NCCL on GPUs.

Each rank keeps a piece of every parameter, of its gradient and of the optimizer's state. As in
`ddp`, batches may have any size, a rank's loss is weighted by its part of the global batch, and a
NaN is detected before it is reduced. A checkpoint holds the whole model, so that a different number
of ranks can resume from it.
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
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
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

# Option `precision` -> dtype of forward and backward. Parameters, reduced gradients and the
# optimizer's state are always float32.
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
# The whole state is gathered on rank 0's CPU; rank 0 reads it back, and each rank takes its pieces.
WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Sharded(FSDPModule, modules.Model):
    """The type of a model after `fully_shard`."""


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says, each rank in its own process."""
    return ranks.run(scenario)


def train(rank: Rank) -> None:
    """Train one rank, from its start or the last checkpoint to its last step.

    Raises NotFinite if a loss or a gradient is not finite.
    """
    scenario = rank.scenario
    torch.manual_seed(rank.seed)  # for dropout, different on every rank
    model = shard(rank, modules.Model(scenario).to(rank.device))
    optimizer = modules.optimizer_of(scenario, model)  # after sharding: it holds pieces
    scheduler = modules.scheduler_of(scenario, optimizer)
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


def shard(rank: Rank, model: modules.Model) -> Sharded:
    """Shard `model`, in place, so that every rank has a piece of each parameter.

    All ranks must have built the same model: `fully_shard` does not compare them. A model with
    layers is better sharded layer by layer first: then only one layer at a time is gathered.

    Raises UsageError if the option `precision` is not one of PRECISIONS.
    """
    mesh = init_device_mesh(rank.device.type, (rank.world_size,), mesh_dim_names=("fsdp",))
    precision = rank.scenario.options.get("precision", "float32")
    if precision not in PRECISIONS:
        raise UsageError(f"option precision={precision!r}: allowed are {', '.join(PRECISIONS)}")
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[precision], reduce_dtype=torch.float32)
    return cast("Sharded", fully_shard(model, mesh=mesh, mp_policy=policy))


def unsharded(model: Sharded) -> dict[str, nn.Parameter]:
    """Return the unsharded trainable parameters.

    They have values only while the rank computes. Their `.grad` is this rank's gradient, before the
    reduction.
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
    """Leave each rank's piece of the global batch's mean gradient in `.grad`."""
    model.zero_grad()
    weight = total_weight(rank, model, ids)
    parts = micro_batches(rank, ids, rank.index)
    for number, part in enumerate(parts):
        # Before the last micro-batch a rank keeps its whole gradient, as without sharding: this
        # saves traffic. Reducing after every micro-batch is also correct, and saves memory.
        model.set_requires_gradient_sync(number == len(parts) - 1)
        obs.samples(part, epoch=epoch)
        # A rank without samples takes part, too, with a loss of zero.
        loss = model(part) if part else model(ids[:1]) * 0
        guard.begin(loss)
        own = model.count(part)
        obs.loss(loss.detach() / max(own, 1.0), own)
        (loss.float() * rank.world_size / weight).backward()  # FSDP divides by world_size


def clip(scenario: Scenario, model: nn.Module) -> None:
    """Clip the reduced gradient, in place, by the norm over the pieces of all ranks.

    The norm is float64: float32 squares may overflow.
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
    """Write the whole model, and all other state for a resume, to one file on rank 0.

    For models that no rank can hold, use `torch.distributed.checkpoint.save` instead.
    """
    random = rank.all_random_states()
    # Without an optimizer state (before the first step, or with SGD) torch would take a step with
    # zero gradients to create one, and Adam would count that step.
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
    """Restore the checkpoint's state; return the position and the next step.

    The random state is restored if this worker saved one.
    """
    saved = torch.load(rank.checkpoint, map_location="cpu", mmap=True, weights_only=True)
    state_dict.set_model_state_dict(model, saved["model"], options=FROM_RANK_0)
    if saved["optimizer"]:
        state_dict.set_optimizer_state_dict(
            model, optimizer, saved["optimizer"], options=FROM_RANK_0
        )
    scheduler.load_state_dict(saved["scheduler"])
    for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = learning_rate  # needed if the checkpoint has no optimizer state
    if rank.worker in saved["random"]:
        rank.restore_random(saved["random"][rank.worker])
    return sharding.Position(saved["epoch"], saved["offset"]), saved["step"]
