"""A scenario's workload as a `torch.nn.Module`, with its optimizer and schedule by torch.

Used by `ddp` and similar trainers. Parameters have the names of the workload's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic import optimizer as rules
from entrenar_py.train.coordinator import models

MOMENTUM = 0.9


class Model(nn.Module):
    """A module with the tensors of a workload; it maps sample ids to the SUM of their losses."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.workload = models.model_of(scenario)
        self._dropout = scenario.dropout
        values = self.workload.initial(scenario.rng("initial"))
        for spec in self.workload.specs:
            *path, name = spec.name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            value = torch.from_numpy(values[spec.name])
            if spec.role == "buffer":
                place.register_buffer(name, value)
            else:
                place.register_parameter(name, nn.Parameter(value, spec.role == "trainable"))

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Return the summed loss of `ids`, 0-d; there must be at least one."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        batch = self.workload.batch(ids)
        return self.workload.loss_of(tensors, batch, linear=_linear, drop=self._drop)

    def count(self, ids: Sequence[int]) -> float:
        """Return the weight of `ids` in the mean: their number of samples or tokens."""
        return float(self.workload.weight(ids)) if ids else 0.0

    def statistics(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return for each buffer the sum over `ids` of what it averages, on the buffer's device."""
        totals = self.workload.statistics(ids) if ids else {}
        return {
            name: torch.from_numpy(totals[name]).to(buffer) if ids else torch.zeros_like(buffer)
            for name, buffer in self.named_buffers()
        }

    def move_buffers(self, totals: dict[str, Tensor], num_samples: int) -> None:
        """Move the running means towards the mean over the whole batch."""
        for name, buffer in self.named_buffers():
            buffer.lerp_(totals[name] / num_samples, engine.BUFFER_MOMENTUM)

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self._dropout) if self._dropout else x


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer in the precision of the weights, whatever that of `x`."""
    return nn.functional.linear(x.to(weight.dtype), weight, bias)


def optimizer_of(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer for the model's parameters, in two groups: decayed and others."""
    there = {name: p for name, p in model.named_parameters() if p.requires_grad}
    specs = [spec for spec in models.model_of(scenario).specs if spec.name in there]
    groups = [
        {
            "params": [there[spec.name] for spec in specs if spec.decayed == decayed],
            "weight_decay": scenario.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if scenario.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=scenario.learning_rate)
    momentum = MOMENTUM if scenario.optimizer == "momentum" else 0.0
    return torch.optim.SGD(groups, lr=scenario.learning_rate, momentum=momentum)


def scheduler_of(
    scenario: Scenario, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scenario's schedule as a factor on the peak learning rate."""

    def factor(step: int) -> float:
        return rules.learning_rate(
            step,
            peak=1.0,
            kind=scenario.schedule,
            warmup_steps=scenario.warmup_steps,
            num_steps=scenario.num_steps,
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
