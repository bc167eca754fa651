"""Strategies `tensor_parallel` and `sequence_parallel`: ranks share each layer, and all shards.

With the second, hidden states between attentions and MLPs are cut, too: each rank has a part of
every sequence there. All ranks compute the loss of all shards.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import backward
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from entrenar_py.train.finetune.strategies import cut_layers, probe
from entrenar_py.train.finetune.strategies.step import Shards, Step
from entrenar_py.train.finetune.strategies.strategy import Strategy, gradient_of, trainable_of
from entrenar_py.train.model import blocks, layer_plan


class TensorParallel(Strategy):
    """Layers in pieces; hidden states between them are whole on all ranks."""

    name = "tensor_parallel"

    def __init__(self, shards: Shards) -> None:
        self._shards, self.device = shards, shards.device
        workload, module = shards.workload, shards.workload.module
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        with probe.filled(module):
            before = probe.reference(workload, next(module.parameters()).device)
            self._terms = self._cut(module, mesh)
            workload.objective.to(self.device)
            cut_layers.complete_gradients(module)
            after = probe.logits(workload, self.device)
        probe.require_same(before, after, self.name, type(module).__name__)
        self._objective = cast("Any", workload.objective)
        self.trainable = trainable_of(module)

    def _cut(self, module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
        """Cut the model, in place; return what of whose gradient each rank has a term."""
        plan = layer_plan.plan_of(module)
        cut_layers.cut(plan, mesh, outside=Replicate())
        return list(cut_layers.terms(plan, module, in_blocks=None))

    def compute(self, step: Step) -> Tensor:
        """Implement `Strategy.compute`."""
        self._objective.zero_grad()
        losses = self._shards.zeros()
        for shard in range(len(step.shards)):
            loss = self._shards.loss(self._objective, step, shard)
            losses[shard] = loss.detach()
            backward(loss / step.weight)
        for parameter in self._terms:
            dist.all_reduce(gradient_of(parameter))
        return losses if dist.get_rank() == 0 else losses * 0  # all ranks have the same

    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Implement `Strategy.logits`."""
        found: Tensor = self._objective.logits(tokens, mask)
        return found if dist.get_rank() == 0 else None  # all ranks have the same


class SequenceParallel(TensorParallel):
    """Layers in pieces; between them each rank has a part of every sequence."""

    name = "sequence_parallel"

    def _cut(self, module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
        self._shards.workload.fill_up(mesh.size())
        plan = layer_plan.plan_of(module)
        cut_layers.cut(plan, mesh, outside=Shard(1))
        layers = blocks.of(module)
        layers[0].register_forward_pre_hook(
            lambda _, inputs: (cut_layers.scattered(inputs[0], mesh), *inputs[1:])
        )
        layers[-1].register_forward_hook(lambda *call: cut_layers.gathered(call[2], mesh))
        return list(cut_layers.terms(plan, module, in_blocks=layers))
