"""Bugs in trainers that use DistributedDataParallel, which it does not prevent."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import entrenar_py
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.systems.torch import ddp as trainer
from entrenar_py.systems.torch import modules, steps
from entrenar_py.systems.torch.ranks import Rank
from entrenar_py.systems.torch.steps import FiniteGuard, NotFinite
from entrenar_py.train.arithmetic import sharding

from .subjects import DDP, ddp, visit

_accumulate, _load = trainer.accumulate, trainer.load
_forward: Any = DistributedDataParallel.forward


# The models to which `hooked` has given hooks.
_hooked: WeakSet[DistributedDataParallel] = WeakSet()

WRAPPER = "torch.nn.parallel.DistributedDataParallel"
GUARD = "entrenar_py.systems.torch.steps"


def bypassed(self: DistributedDataParallel, *inputs: Any) -> Any:
    """Calls the wrapped module directly."""
    return self.module(*inputs)


def left_off(self: DistributedDataParallel, *inputs: Any) -> Any:
    """Computes the last micro-batch inside `no_sync`, too."""
    with self.no_sync():
        return _forward(self, *inputs)


def cleared(self: DistributedDataParallel, *inputs: Any) -> Any:
    """Clears the gradients before each micro-batch."""
    self.module.zero_grad()
    return _forward(self, *inputs)


def hooked(self: DistributedDataParallel, *inputs: Any) -> Any:
    """Reduces by its own hooks, which get the last micro-batch's gradient, not the sum of all."""

    def reduce(gradient: Tensor) -> Tensor:
        if self.require_backward_grad_sync:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return gradient

    if self not in _hooked:
        _hooked.add(self)
        for parameter in self.module.parameters():
            parameter.register_hook(reduce)
    return self.module(*inputs)


def clipped_before(
    rank: Rank, model: DistributedDataParallel, guard: FiniteGuard, obs: Any, *where: Any
) -> None:
    """Clips each rank's gradient, then averages them."""
    with model.no_sync():
        _accumulate(rank, model, guard, obs, *where)
    trainer.clip(rank.scenario, model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def padded(rank: Rank, ids: sharding.Ids, index: int) -> list[sharding.Ids]:
    """Distributes samples as torch's sampler does: evenly, by repeating the first ones."""
    data: Any = ids
    sampler: DistributedSampler[int] = DistributedSampler(
        data, num_replicas=rank.world_size, rank=index, shuffle=False
    )
    return sharding.cut([ids[place] for place in sampler], rank.scenario.accumulation)


def reduced_first(
    rank: Rank,
    model: DistributedDataParallel,
    guard: FiniteGuard,
    obs: entrenar_py.Observation,
    *where: Any,
) -> None:
    """Checks only the reduced gradient, where every rank finds the NaN and rank 0 is blamed."""
    _accumulate(rank, model, guard, obs, *where)
    guard._flags.clear()
    guard._flags.append(torch.zeros(1, dtype=torch.bool))
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise NotFinite(0, 0, name)


def found_here(found: list[Tensor], own: Tensor) -> None:
    """Ignores what other ranks found."""
    found[:] = [torch.full_like(own, steps._NONE) for _ in found]
    found[dist.get_rank()] = own


def of_rank_0(rank: Rank, *state: Any) -> Any:
    """Resumes every rank with the random state of rank 0."""
    loaded = _load(rank, *state)
    saved = torch.load(rank.checkpoint, weights_only=True)
    rank.restore_random(saved["random"][rank.workers[0]])
    return loaded


def own_statistics(rank: Rank, model: modules.Model, ids: sharding.Ids) -> None:
    """Moves the running means by the mean of this rank's samples."""
    local = sharding.cut(ids, rank.world_size)[rank.index]
    model.move_buffers(model.statistics(local), max(len(local), 1))


_TEN_ON_THREE = ddp(world_size=3, num_samples=10, batch_size=10, num_shards=3, num_steps=1)

VARIANTS = (
    Variant(
        name="torch-ddp-bypass",
        summary="the module inside DistributedDataParallel is called, so that nothing is reduced",
        source="jingyaogong/minimind #853, Megatron-LM #1685 and others",
        plants={f"{WRAPPER}.forward": bypassed},
        scenario=ddp(),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="torch-no-sync-left-on",
        summary="no_sync is left on for the last micro-batch",
        source="classic (no_sync around the whole loop)",
        plants={f"{WRAPPER}.forward": left_off},
        scenario=ddp(accumulation=2),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="torch-hook-preacc",
        summary="a hook reduces the last micro-batch's gradient; the earlier ones stay local",
        source="huggingface/picotron d0efdcc",
        plants={f"{WRAPPER}.forward": hooked},
        scenario=ddp(accumulation=2),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="torch-ga-drop",
        summary="zero_grad is inside the loop over micro-batches",
        source="DeepSpeed #6550, torchtitan #3575",
        plants={f"{WRAPPER}.forward": cleared},
        scenario=ddp(accumulation=2),
        invariants=("F-DP-005", "F-TI-001"),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="torch-clip-before",
        summary="each rank clips its own gradient, then they are averaged",
        source="Horovod torch optimizer: synchronize() must come first",
        plants={f"{DDP}.accumulate": clipped_before},
        scenario=ddp(batch_size=13, clip_norm=0.05),
        invariants=("F-DP-005",),
        place={"step": 0, "rank": 0, "tensor": "hidden1.weight"},
    ),
    Variant(
        name="torch-sampler-pad",
        summary="DistributedSampler repeats samples, so that all ranks have the same number",
        source="pytorch #25162, Lightning #2398",
        plants={f"{DDP}.micro_batches": padded},
        scenario=_TEN_ON_THREE,
        invariants=("F-DP-002",),
        # Ten samples are padded to twelve by the first two, for ranks 1 and 2.
        place={"step": 0, "rank": 1, "sample_ids": (visit(_TEN_ON_THREE)[0],)},
    ),
    Variant(
        name="torch-nan-after-reduce",
        summary="finiteness is checked after the reduction: the NaN's rank is unknown",
        source="Megatron-LM d66807759c",
        plants={f"{DDP}.accumulate": reduced_first},
        scenario=ddp(
            faults=(Fault(kind="non_finite_gradient", step=1, rank=1, value="nan"),),
        ),
        invariants=("F-DP-003",),
        place={"step": 1, "rank": 1},
    ),
    Variant(
        name="torch-inf-one-rank",
        summary="a rank without an overflow doesn't learn of another rank's, and takes the step",
        source="pytorch #115710",
        plants={f"{GUARD}.dist.all_gather": found_here},
        scenario=ddp(
            workload="linear",
            faults=(Fault(kind="non_finite_gradient", step=1, rank=1, value="inf"),),
        ),
        invariants=("F-DP-003",),
        place={"step": 1, "rank": 1},
    ),
    Variant(
        name="torch-buffer-unsynced",
        summary="running means follow each rank's own samples",
        source="classic (batch-norm statistics)",
        plants={f"{DDP}.update_buffers": own_statistics},
        scenario=ddp(),
        invariants=("F-DP-001",),
        place={"step": 0, "rank": 1, "tensor": "running_mean"},
    ),
    Variant(
        name="torch-rng-restore",
        summary="a checkpoint gives every rank the random state of rank 0",
        source="Megatron-LM #6858",
        plants={f"{DDP}.load": of_rank_0},
        scenario=ddp(stops=(1,), dropout=0.2),
        invariants=("F-TI-005", "F-TI-003"),
        place={"step": 1, "rank": 1, "shard": 1},
    ),
)
