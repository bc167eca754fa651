"""Bugs in trainers that use `fully_shard`, which it does not check."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch import fsdp as trainer
from entrenar_py.systems.torch import modules, steps
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.train.arithmetic import sharding

from .subjects import FSDP, TORCH_MODULE, fsdp

_shard, _save, _load = trainer.shard, trainer.save, trainer.load
_weight = steps.total_weight
_optimizer_of = modules.optimizer_of
_synchronise = FSDPModule.set_requires_gradient_sync

_DEAD_STEP = 2  # liveness is decided after three steps


def unlike(rank: Rank, model: modules.Model) -> trainer.Sharded:
    """Builds different weights on each rank, so that the whole model is a mix of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * rank.index)
    return _shard(rank, model)


def halved(rank: Rank, model: modules.Model) -> trainer.Sharded:
    """Creates the parameters in bfloat16, which is meant only for computing."""
    return _shard(rank, model.to(torch.bfloat16))


def stale(scenario: Scenario, model: modules.Model) -> torch.optim.Optimizer:
    """Builds the optimizer with the parameters from before sharding."""
    return _optimizer_of(scenario, modules.Model(scenario))


def never_reduced(self: FSDPModule, requires: bool, **more: Any) -> None:
    """Never reduces: every micro-batch is computed without synchronisation."""
    _synchronise(self, False, **more)


def divided_again(rank: Rank, model: modules.Model, ids: sharding.Ids) -> float:
    """Divides by the number of ranks again, after `fully_shard`."""
    return _weight(rank, model, ids) * rank.world_size


def by_own_norm(scenario: Scenario, model: nn.Module) -> None:
    """Takes the norm of each rank's pieces for the norm of the whole."""
    assert scenario.clip_norm is not None
    trainable = list(model.parameters())
    norms = [p.grad.to_local().norm() for p in trainable if isinstance(p.grad, DTensor)]
    clip_grads_with_norm_(trainable, scenario.clip_norm, torch.stack(norms).norm())


def asked_first(rank: Rank, model: Any, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
    """Saves an optimizer state that does not exist yet: torch makes a step to create it."""
    state_dict.get_optimizer_state_dict(model, optimizer)
    _save(rank, model, optimizer, *rest)


def shifted(rank: Rank, model: Any, optimizer: torch.optim.Optimizer, *rest: Any) -> Any:
    """Shifts the pieces of moments by one element on load, as by another padding."""
    loaded = _load(rank, model, optimizer, *rest)
    for state in optimizer.state.values():
        piece = state["momentum_buffer"].to_local()
        piece.copy_(piece.roll(1))
    return loaded


VARIANTS = (
    Variant(
        name="fsdp-init-rankseed",
        summary="ranks initialise differently, and fully_shard takes a piece from each",
        source="composer #2833",
        plants={f"{FSDP}.shard": unlike},
        scenario=fsdp(),
        invariants=("F-DP-005",),
        place={"step": -1, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fsdp-master-half",
        summary="parameters are created in bfloat16, and small updates are lost",
        source="Lightning #21586",
        plants={f"{FSDP}.shard": halved},
        scenario=fsdp(workload="linear", num_steps=4, learning_rate=1e-5),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "weight"},
    ),
    Variant(
        name="fsdp-opt-stale",
        summary="the optimizer was created before sharding, and holds stale parameters",
        source="accelerate #2665 and #3256",
        plants={f"{TORCH_MODULE}.optimizer_of": stale},
        scenario=fsdp(num_steps=4),
        invariants=("F-TI-004",),
        place={"step": _DEAD_STEP, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fsdp-never-reduced",
        summary="set_requires_gradient_sync(False) is never undone",
        source="classic (no_sync around the whole loop)",
        plants={"torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync": never_reduced},
        scenario=fsdp(),
        invariants=("F-DP-005",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fsdp-divided-twice",
        summary="the loss is divided by the number of ranks, and the gradient again",
        source="torchtitan #1551, DeepSpeed #5618 (scaled by the wrong group)",
        plants={f"{FSDP}.total_weight": divided_again},
        scenario=fsdp(),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fsdp-clip-own-norm",
        summary="each rank clips its pieces by their own norm",
        source="classic (clip_grad_norm_ of local shards)",
        plants={f"{FSDP}.clip": by_own_norm},
        scenario=fsdp(clip_norm=0.05),
        invariants=("F-TI-008",),
        place={"step": 0, "rank": 0},
    ),
    Variant(
        name="fsdp-state-probe",
        summary="reading an optimizer's state takes a step, and Adam counts it",
        source="Megatron-LM #5976; torch's _init_optim_state",
        plants={f"{FSDP}.save": asked_first},
        scenario=fsdp(optimizer="adamw", stops=(1,), weight_decay=0.1),
        invariants=("F-TI-003",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="fsdp-ckpt-pad",
        summary="pieces of moments are read with a different padding from the written one",
        source="DeepSpeed #5105",
        plants={f"{FSDP}.load": shifted},
        scenario=fsdp(optimizer="momentum", stops=(1,)),
        invariants=("F-TI-003",),
        place={"step": 1, "rank": 0},
    ),
)
