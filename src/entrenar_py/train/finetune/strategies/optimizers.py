"""AdamW in the memory of a rank's device: on each of its tensors, or on one vector of all.

Weight decay applies to matrices only. Clipping follows the rule of the reference trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic import on_device
from entrenar_py.train.arithmetic.on_device import MOMENTS
from entrenar_py.train.arithmetic.optimizer import BETA1, BETA2, EPSILON, Rule

Trainable = Mapping[str, nn.Parameter]
Moments = Mapping[str, Mapping[str, Tensor]]  # by kind, then by the name of the tensor


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`. If it took no part in the loss, it gets zeros first."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Optimizer(ABC):
    """AdamW on this rank's part of the trainable tensors, with their gradients in `.grad`."""

    @abstractmethod
    def clip(self, norm: float, clip_norm: float | None) -> float:
        """Scale the gradient down to `clip_norm` if its `norm` is larger; return its norm then."""

    @abstractmethod
    def step(self, rate: float) -> None:
        """Take a step with learning rate `rate`."""

    @abstractmethod
    def moment(self, kind: str, parameter: nn.Parameter) -> Tensor:
        """Return the moment of a parameter, one of MOMENTS, in the layout of the parameter."""

    @abstractmethod
    def restore(self, count: int, moments: Moments) -> None:
        """Continue after `count` steps with `moments`, in the layout of the parameters."""


class TensorAdamW(Optimizer):
    """torch's AdamW on `trainable`, which may have DTensors.

    DTensors form separate groups, since multi-tensor kernels can't mix them with plain tensors.
    """

    def __init__(self, plan: TrainingPlan, trainable: Trainable) -> None:
        self._trainable = trainable
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for parameter in trainable.values():
            is_matrix, is_distributed = parameter.dim() > 1, isinstance(parameter, DTensor)
            groups.setdefault((is_matrix, is_distributed), []).append(parameter)
        self._adamw = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": plan.weight_decay if is_matrix else 0.0}
                for (is_matrix, _), group in groups.items()
            ],
            lr=plan.learning_rate,
            betas=(BETA1, BETA2),
            eps=EPSILON,
        )

    def clip(self, norm: float, clip_norm: float | None) -> float:
        if clip_norm is None or clip_norm / (norm + 1e-6) >= 1:
            return norm
        factor = clip_norm / (norm + 1e-6)
        torch._foreach_mul_([local(gradient_of(one)) for one in self._trainable.values()], factor)
        return norm * factor

    def step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def moment(self, kind: str, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._adamw.state:
            return torch.zeros_like(parameter)
        moment: Tensor = self._adamw.state[parameter][kind]
        return moment

    def restore(self, count: int, moments: Moments) -> None:
        for name, parameter in self._trainable.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(count)),
                **{kind: moments[kind][name] for kind in MOMENTS},
            }


class VectorAdamW(Optimizer):
    """The AdamW of a worker on a device, on one vector of all `weights`.

    `gradient` is a vector, too. `parts` returns the part of each tensor in a vector, by name.
    """

    def __init__(
        self,
        rule: Rule,
        trainable: Trainable,
        *,
        weights: Tensor,
        gradient: Tensor,
        parts: Callable[[Tensor], Mapping[str, Tensor]],
    ) -> None:
        self._adamw = on_device.AdamW(rule, weights)
        self._gradient, self._clipped = gradient, gradient
        self._parts = parts
        self._names = {parameter: name for name, parameter in trainable.items()}

    def squares(self) -> Tensor:
        """Return the sum of squares of the gradient, 0-d float64 on the device."""
        return self._adamw.squares(self._gradient)

    def clip(self, norm: float, clip_norm: float | None) -> float:
        self._clipped = self._adamw.clip(self._gradient, norm, clip_norm)
        is_clipped = self._clipped is not self._gradient
        return norm * (clip_norm / (norm + 1e-6)) if is_clipped and clip_norm is not None else norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self._adamw.step(self._clipped, rate)

    def moment(self, kind: str, parameter: nn.Parameter) -> Tensor:
        return self._parts(self._adamw.moments[kind])[self._names[parameter]]

    def restore(self, count: int, moments: Moments) -> None:
        self._adamw.count = count
        for kind, vector in self._adamw.moments.items():
            for name, part in self._parts(vector).items():
                part.copy_(moments[kind][name])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the moments, not copies."""
        return {"count": self._adamw.count, **self._adamw.moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the `state_dict` of another rank."""
        self._adamw.count = state["count"]
        for kind, vector in self._adamw.moments.items():
            vector.copy_(state[kind])
