"""Strategies `ddp` and `ddp_canonical`: every rank has the whole model, and some shards of a batch.

`ddp` reduces by torch's own all-reduce, whose sums depend on the number of ranks. `ddp_canonical`
adds along one tree over the logical shards: the weights have the same bits for 1, 2, 4 ... ranks.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel

import entrenar_py
from entrenar_py.train.finetune.strategies.step import Shards, Step
from entrenar_py.train.finetune.strategies.strategy import Strategy, trainable_of


class _Whole(Strategy):
    """A strategy whose ranks have the whole model each."""

    shares_rows = True

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device = shards, shards.device
        self._objective = shards.workload.objective.to(self.device)
        self.trainable = trainable_of(shards.workload.module)

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Implement `Strategy.logits`."""
        found: Tensor = cast("Any", self._objective).logits(tokens, mask)
        return found


class Replicated(_Whole):
    """DistributedDataParallel. Only a rank's last shard of a step is synchronised."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards)
        # With find_unused_parameters DDP doesn't rebuild its buckets after a process's first step.
        # With three ranks or more, a rebuild changes the order of sums, and a resume the bits.
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
    """DistributedDataParallel with the canonical all-reduce; the shards are the tree's leaves."""

    def __init__(self, shards: Shards) -> None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first product
        torch.use_deterministic_algorithms(True)
        # As `backends.cuda`: each new tensor would be filled first, by a kernel of its own.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        super().__init__(shards)
        self._model = DistributedDataParallel(self._objective, gradient_as_bucket_view=True)
        num_shards = shards.scenario.num_shards
        self._reducer = entrenar_py.canonical_all_reduce(self._model, micro_batches=num_shards)

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        losses, num_shards = self._shards.zeros(), len(step.shards)
        for shard in self._reducer.fold(self._reducer.shards):
            loss = self._shards.loss(self._model, step, shard)
            losses[shard] = loss.detach()
            backward(loss * (num_shards / step.weight))  # the reducer divides by num_shards
        return losses
