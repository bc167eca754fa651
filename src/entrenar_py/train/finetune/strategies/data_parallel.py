"""Strategies of `BY_SHARDS`: each rank computes some shards of a batch.

With `ddp` and `ddp_canonical`, every rank has the whole model. `ddp` uses torch's own all-reduce,
so its sums depend on the number of ranks. `ddp_canonical` adds along one tree over the logical
shards, so the weights have the same bits for 1, 2, 4 ... ranks.

What is trained is one vector if it is small (`vector`). It is reduced after the last shard. For
large tensors DistributedDataParallel reduces buckets while the last shard's backward pass computes.

With `fsdp`, a rank keeps a piece of every tensor (fully_shard). Each decoder block is gathered
before it computes, and freed afterwards. Frozen tensors may have a different dtype than trained
tensors. `fsdp_canonical` adds gradients along the tree of `ddp_canonical`, and one norm over whole
gradients, so its weights have the same bits for any number of ranks.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.train.canonical import reducer, requirements, sharded_reducer
from entrenar_py.train.canonical.reducer import Fold
from entrenar_py.train.finetune.strategies import vector
from entrenar_py.train.finetune.strategies.optimizers import VectorAdamW, gradient_of
from entrenar_py.train.finetune.strategies.strategy import (
    Objective,
    Shards,
    Step,
    Strategy,
    trainable_of,
)
from entrenar_py.train.finetune.strategies.vector import Vector
from entrenar_py.train.model import blocks


def ddp(shards: Shards) -> Strategy:
    """Return the strategy `ddp`."""
    is_small = vector.is_small(shards, trainable_of(shards.workload.module))
    return Replicated(shards) if is_small else ReplicatedByBuckets(shards)


def ddp_canonical(shards: Shards) -> Strategy:
    """Return the strategy `ddp_canonical`."""
    use_deterministic_kernels()
    is_small = vector.is_small(shards, trainable_of(shards.workload.module))
    return Canonical(shards) if is_small else CanonicalByBuckets(shards)


def use_deterministic_kernels() -> None:
    """Let this process use kernels that give the same bits in every run."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first matrix product
    torch.use_deterministic_algorithms(True)
    # As in `compute.on_torch`: otherwise an extra kernel would fill each new tensor first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _fold(fold: Fold, objective: Objective, shards: Shards, step: Step) -> Tensor:
    """Leave the mean over all ranks in every `.grad`; return the losses of this rank's shards."""
    losses, num_shards = shards.zeros(), len(step.shards)
    for shard in fold.fold(fold.shards):
        loss = shards.loss(objective, step, shard)
        if not fold.is_repeat:
            losses[shard] = loss.detach()
        backward(loss * (num_shards / step.weight))  # the fold divides by num_shards
    return losses


class _Whole(Strategy):
    """A strategy in which each rank has the whole model."""

    shares_rows = True

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._objective = shards.workload.objective.to(self.device)
        self.trainable = trainable_of(shards.workload.module)

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = cast("Any", self._objective).logits(tokens, mask)
        return found


class _AsVector(_Whole):
    """A strategy in which each rank has all trainable tensors as one vector."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._vector = Vector(shards, self.trainable)
        self._share = shards.share(dist.get_rank(), dist.get_world_size())

    @abstractmethod
    def _add(self, gradients: Iterator[Tensor], total: Tensor) -> None:
        """Write the sum of this rank's `gradients`, and those of all other ranks, to `total`."""

    @property
    def is_ahead(self) -> bool:
        """See `Strategy`."""
        return self._vector.is_ahead

    def prepare(self, step: Step) -> None:
        """See `Strategy`."""
        self._shards.prepare(step, self._share[0])

    def optimizer(self) -> VectorAdamW:
        """See `Strategy`."""
        return self._vector.optimizer

    def squares(self) -> Tensor:
        """See `Strategy`."""
        return self._vector.optimizer.squares()

    @torch.no_grad()
    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        losses = self._shards.zeros()
        gradients = self._vector.gradients(step, self._share, losses)
        self._add(gradients, self._vector.gradient)
        self._vector.divide(step)
        return losses


class Replicated(_AsVector):
    """torch's own all-reduce of one vector."""

    def _add(self, gradients: Iterator[Tensor], total: Tensor) -> None:
        total.zero_()
        for gradient in gradients:
            total.add_(gradient)
        dist.all_reduce(total)


class Canonical(_AsVector):
    """The canonical all-reduce of one vector. Shards are the leaves of the tree."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        group = dist.group.WORLD
        assert group is not None, "ranks have joined it"
        self._exchange = reducer.exchange_of(group, self.device, scale=1.0)
        self._counter = reducer.Counter()

    def _add(self, gradients: Iterator[Tensor], total: Tensor) -> None:
        key, last = self._vector.weights, len(self._share) - 1
        for place, gradient in enumerate(gradients):
            if place < last:
                self._counter.push({key: gradient.clone()})
            else:
                total.copy_(gradient)
        self._counter.complete([key], [total])
        self._exchange(total).wait()


class ReplicatedByBuckets(_Whole):
    """DistributedDataParallel. Gradients are reduced only for a rank's last shard of a step."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        # With find_unused_parameters, DDP doesn't rebuild its buckets after a process's first step.
        # A rebuild changes the order of sums with three ranks or more. Then a resumed run, which
        # has another first step, would get different bits.
        self._model = DistributedDataParallel(
            self._objective, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        self._share = shards.share(dist.get_rank(), dist.get_world_size())

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        self._model.zero_grad()
        losses, world_size = self._shards.zeros(), dist.get_world_size()
        for shard in self._share:
            with nullcontext() if shard == self._share[-1] else self._model.no_sync():
                loss = self._shards.loss(self._model, step, shard)
                losses[shard] = loss.detach()
                backward(loss * (world_size / step.weight))  # DDP divides by world_size
        return losses


class CanonicalByBuckets(_Whole):
    """DistributedDataParallel with the canonical all-reduce. Shards are the leaves of the tree."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        self._model = DistributedDataParallel(self._objective, gradient_as_bucket_view=True)
        num_shards = self.plan.num_shards
        self._reducer = entrenar_py.canonical_all_reduce(self._model, micro_batches=num_shards)

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        return _fold(self._reducer, self._model, self._shards, step)


class FullySharded(Strategy):
    """A model in pieces, gathered block by block."""

    shares_rows = True

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        world_size = dist.get_world_size()
        mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("fsdp",))
        objective, module = shards.workload.objective, shards.workload.module
        for block in blocks.of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(objective, mesh=mesh)
        self._objective = cast("Any", objective)
        assert isinstance(objective, FSDPModule)
        register_fsdp_forward_method(objective, "logits")
        self.trainable = trainable_of(module)

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        self._objective.zero_grad()
        losses, world_size = self._shards.zeros(), dist.get_world_size()
        turns = list(self._shards.padded(dist.get_rank(), world_size))
        for number, shard in enumerate(turns):
            # Before the last shard a rank keeps its whole gradient: that saves traffic.
            self._objective.set_requires_gradient_sync(number == len(turns) - 1)
            if shard is None:  # other ranks have one more shard, and forward is a collective
                loss = self._shards.loss(self._objective, step, 0) * 0
            else:
                loss = self._shards.loss(self._objective, step, shard)
                losses[shard] = loss.detach()
            backward(loss * (world_size / step.weight))  # FSDP divides by world_size
        return losses

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Implement `Strategy.logits`."""
        found: Tensor = self._objective.logits(tokens, mask)
        self._objective.reshard()  # the root's tensors stay whole until a backward pass
        return found


class FullyShardedCanonical(FullySharded):
    """The same pieces, with the canonical reduce-scatter. Shards are the leaves of the tree."""

    def __init__(self, shards: Shards) -> None:
        use_deterministic_kernels()
        super().__init__(shards)
        # Three ranks share no tree evenly, unless they exchange each shard's gradient.
        self._reducer = entrenar_py.canonical_reduce_scatter(
            self._objective,
            micro_batches=self.plan.num_shards,
            sync_each=not requirements.is_power_of_two(dist.get_world_size()),
        )

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        return _fold(self._reducer, self._objective, self._shards, step)

    def ranks(self) -> list[int]:
        """See `Strategy`."""
        size = dist.get_world_size()
        if requirements.is_power_of_two(size):
            return super().ranks()
        return [shard % size for shard in range(self.plan.num_shards)]

    def squares(self) -> Tensor:
        """See `Strategy`. Adds whole gradients: a sum over pieces depends on the world size."""
        norms = [
            sharded_reducer.norm(cast("DTensor", gradient_of(parameter)), dtype=torch.float64)
            for parameter in self.trainable.values()
        ]
        return torch.stack(norms).square().sum()
