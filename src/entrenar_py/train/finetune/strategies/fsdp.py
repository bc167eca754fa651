"""Strategy `fsdp`: a rank keeps a piece of every tensor (fully_shard), and some shards of a batch.

Each decoder block is gathered when it computes, and let go afterwards. Frozen tensors may have
another format than those that are trained.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from entrenar_py.train.finetune.strategies.step import Shards, Step
from entrenar_py.train.finetune.strategies.strategy import Strategy, trainable_of
from entrenar_py.train.model import blocks


class FullySharded(Strategy):
    """The model in pieces, block by block."""

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
            if shard is None:  # other ranks have one more, and a forward pass is a collective
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
