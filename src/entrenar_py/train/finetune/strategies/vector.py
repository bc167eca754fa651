"""What a rank trains as one vector, with the step of a worker on a GPU.

A worker's `DeviceStep` computes shards, compiled, and recorded on CUDA. The optimizer is a
worker's, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from entrenar_py.compute.on_torch import DeviceStep
from entrenar_py.train.arithmetic import blocks, engine, on_device
from entrenar_py.train.arithmetic.optimizer import Rule
from entrenar_py.train.finetune.strategies.optimizers import VectorAdamW
from entrenar_py.train.finetune.strategies.strategy import Shards, Step


def is_small(shards: Shards, trainable: Mapping[str, nn.Parameter]) -> bool:
    """Return whether a rank trains `trainable` as a vector.

    Large gradients take long to send, and their buffers much memory.
    """
    layout, rule = _layout_and_rule(shards, trainable)
    return on_device.fits(rule, layout.num_trainable)


def _layout_and_rule(
    shards: Shards, trainable: Mapping[str, nn.Parameter]
) -> tuple[blocks.Layout, Rule]:
    specs = (
        replace(spec, shape=tuple(trainable[spec.name].shape)) for spec in shards.workload.specs
    )
    layout, plan = blocks.Layout(tuple(specs)), shards.plan
    return layout, Rule(plan.optimizer, plan.weight_decay, layout.decayed)


class Vector:
    """The trainable tensors of a rank as one vector, and their `gradient` as another.

    The tensors of `trainable`, and the `.grad` of each, become views of these.
    """

    def __init__(self, shards: Shards, trainable: Mapping[str, nn.Parameter]) -> None:
        workload, plan = shards.workload, shards.plan
        self._shards = shards
        workload.move(shards.device)
        self._scale = engine.scale_of(workload.weight_max * plan.batch_size)
        self._step = DeviceStep(shards.device, workload, trainable, self._scale)
        self.weights, self.parts = self._step.weights, self._step.parts
        self.gradient = torch.zeros_like(self.weights)
        for name, part in self.parts(self.weights).items():
            part.copy_(trainable[name].detach())
            trainable[name].data = part
        for name, part in self.parts(self.gradient).items():
            trainable[name].grad = part
        self.optimizer = VectorAdamW(
            _layout_and_rule(shards, trainable)[1],
            trainable,
            weights=self.weights,
            gradient=self.gradient,
            parts=self.parts,
        )

    @property
    def is_ahead(self) -> bool:
        """See `Strategy`."""
        return self.weights.device.type == "cuda" and not self._shards.workload.may_wait

    def gradients(self, step: Step, share: range, losses: Tensor) -> Iterator[Tensor]:
        """Yield the gradient of each shard in `share`, times a scale, and set its loss.

        A gradient is valid until the next one.
        """
        for shard in share:
            if not step.shards[shard]:
                yield torch.zeros_like(self.gradient)
                continue
            with torch.enable_grad():
                drop = self._shards.drop(step, shard)
                found = self._step.computed(self._shards.batch(step, shard), drop)
            losses[shard] = found[-1]
            yield found[:-1]

    def divide(self, step: Step) -> None:
        """Divide the gradient, a sum of `gradients` over all shards, by the weight of `step`."""
        self.gradient.copy_(on_device.mean(self.gradient, step.weight * self._scale))
