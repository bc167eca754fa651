"""Correct variants of trainers on DDP and FSDP: no check may report any of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import fsdp as trainer
from entrenar_py.systems.torch import modules
from entrenar_py.systems.torch.ranks import Rank

from .subjects import DDP, FSDP, TORCH_MODULE, ddp, fsdp

_optimizer_of, _forward = modules.optimizer_of, modules.Model.forward
_shard, _synchronise = trainer.shard, FSDPModule.set_requires_gradient_sync


def otherwise(model: nn.Module, **_: Any) -> DistributedDataParallel:
    """Uses buckets of 400 bytes, gradients that are no views of them, and a static graph."""
    return DistributedDataParallel(
        model, bucket_cap_mb=400 / 2**20, gradient_as_bucket_view=False, static_graph=True
    )


def at_once(self: FSDPModule, requires: bool, **more: Any) -> None:
    """Reduces every micro-batch, and adds up the pieces."""
    _synchronise(self, True, **more)


def put_back(rank: Rank, model: modules.Model) -> trainer.Sharded:
    """Reshards after the forward pass, and sums in the reduction instead of averaging."""
    sharded = _shard(rank, model)
    sharded.set_reshard_after_forward(True)
    sharded.set_force_sum_reduction_for_comms(True)
    return sharded


def recomputed(self: modules.Model, ids: Sequence[int]) -> Tensor:
    """Uses activation checkpointing."""
    loss: Tensor = checkpoint(_forward, self, ids, use_reentrant=False)
    return loss


def fused(scenario: Scenario, model: modules.Model) -> torch.optim.Optimizer:
    """Uses the fused implementation of the optimizer."""
    return _implementation(_optimizer_of(scenario, model), fused=True)


def one_by_one(scenario: Scenario, model: modules.Model) -> torch.optim.Optimizer:
    """Uses the implementation of the optimizer that steps one parameter at a time."""
    return _implementation(_optimizer_of(scenario, model), foreach=False)


def _implementation(built: torch.optim.Optimizer, **flags: bool) -> torch.optim.Optimizer:
    for group in built.param_groups:
        group.update(flags)
    return built


VARIANTS = (
    Variant(
        name="torch-ddp-otherwise",
        summary="small buckets without gradient views, static_graph, recomputation, fused "
        "optimizer",
        plants={
            f"{DDP}.DistributedDataParallel": otherwise,
            f"{TORCH_MODULE}.Model.forward": recomputed,
            f"{TORCH_MODULE}.optimizer_of": fused,
        },
        scenario=ddp(),
        tried=("F-DP-001", "F-DP-005", "F-TI-001"),
    ),
    Variant(
        name="fsdp-otherwise",
        summary="every micro-batch is reduced, all tensors are sharded, sums are divided later",
        plants={
            "torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync": at_once,
            f"{FSDP}.shard": put_back,
            f"{TORCH_MODULE}.optimizer_of": one_by_one,
        },
        scenario=fsdp(accumulation=2),
        tried=("F-DP-001", "F-DP-005", "F-TI-001"),
    ),
)
