"""Strategies `ddp`, `ddp_canonical` and `fsdp`: each rank computes some shards of a batch.

With `ddp` and `ddp_canonical`, every rank has the whole model. `ddp` uses torch's own all-reduce,
so its sums depend on the number of ranks. `ddp_canonical` adds along one tree over the logical
shards, so the weights have the same bits for 1, 2, 4 ... ranks.

With `fsdp`, a rank keeps a piece of every tensor (fully_shard). Each decoder block is gathered
before it computes, and freed afterwards. Frozen tensors may have a different dtype than trained
tensors.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.train.finetune.strategies.strategy import Shards, Step, Strategy, trainable_of
from entrenar_py.train.model import blocks


class _Whole(Strategy):
    """A strategy in which each rank has the whole model."""

    shares_rows = True

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device = shards, shards.device
        self._objective = shards.workload.objective.to(self.device)
        self.trainable = trainable_of(shards.workload.module)

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = cast("Any", self._objective).logits(tokens, mask)
        return found


class Replicated(_Whole):
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


class Canonical(_Whole):
    """DistributedDataParallel with the canonical all-reduce. Shards are the leaves of the tree."""

    def __init__(self, shards: Shards) -> None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
        # As in `compute.on_torch`: otherwise an extra kernel would fill each new tensor first.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        super().__init__(shards)
        self._model = DistributedDataParallel(self._objective, gradient_as_bucket_view=True)
        num_shards = shards.plan.num_shards
        self._reducer = entrenar_py.canonical_all_reduce(self._model, micro_batches=num_shards)

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        losses, num_shards = self._shards.zeros(), len(step.shards)
        for shard in self._reducer.fold(self._reducer.shards):
            loss = self._shards.loss(self._model, step, shard)
            losses[shard] = loss.detach()
            backward(loss * (num_shards / step.weight))  # the reducer divides by num_shards
        return losses


class FullySharded(Strategy):
    """A model in pieces, gathered block by block."""

    shares_rows = True

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device = shards, shards.device
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
