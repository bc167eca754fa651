"""Checkpoints of sharded trainers: one file of whole tensors, under the model's names.

The file does not depend on shards and stages, so that any number of ranks can resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from entrenar_py.systems.torch.ranks import Rank, write
from entrenar_py.train.arithmetic import sharding


def save(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: sharding.Position,
    step: int,
) -> None:
    """Write the state of all ranks and their random states on rank 0; all ranks must call it."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    own: dict[str, Any] = {
        "model": {name: whole(one) for name, one in tensors_of(model).items()},
        "optimizer": {
            names[parameter]: {key: whole(value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        },
        "random": {rank.worker: rank.random_states()},
    }
    parts: list[Any] | None = [None] * rank.world_size if rank.index == 0 else None
    dist.gather_object(own, parts)
    if parts is not None:
        content: dict[str, Any] = {
            key: {n: v for part in parts for n, v in part[key].items()} for key in own
        }
        content |= {"epoch": position.epoch, "offset": position.offset, "step": step}
        write(rank.checkpoint, content)
    dist.barrier()


def load(
    rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR
) -> tuple[sharding.Position, int]:
    """Restore the checkpoint's state; return the position and the next step.

    The random state is restored if this worker saved one.
    """
    saved = torch.load(rank.checkpoint, map_location=rank.device, weights_only=True)
    step: int = saved["step"]
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(placed(global_name(name), saved["model"], like=tensor))
    for name, parameter in model.named_parameters():
        if name in saved["optimizer"]:
            state = saved["optimizer"][name]
            optimizer.state[parameter] = {key: placed(key, state, like=parameter) for key in state}
    scheduler.last_epoch = step
    for group, peak, factor in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = peak * factor(step)
    if rank.worker in saved["random"]:
        rank.restore_random(saved["random"][rank.worker])
    return sharding.Position(saved["epoch"], saved["offset"]), step


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def global_name(name: str) -> str:
    """Return the name of this rank's tensor `name` in the file, which is the same."""
    return name


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; all ranks that hold a piece must call it."""
    held = tensor.detach()
    return held.full_tensor() if isinstance(held, DTensor) else held


def placed(name: str, saved: Mapping[str, Tensor], *, like: Tensor) -> Tensor:
    """Return `saved[name]`, or this rank's piece of it if `like` is a DTensor of the same shape."""
    value = saved[name]
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    # Every rank has the whole tensor and takes its piece without communication.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
