"""The gradient of a summed loss by torch's autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from entrenar_py.training.tensors import Array, TensorSpec


def differentiate(
    loss: Tensor, tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec], scale: float
) -> tuple[float, list[Array]]:
    """`loss`, and `scale` times its gradient for each trainable one of `tensors`, as specs go."""
    leaves = [tensors[spec.name] for spec in specs if spec.role == "trainable"]
    gradients = torch.autograd.grad(loss, leaves, grad_outputs=torch.tensor(scale))
    return loss.item(), [gradient.numpy() for gradient in gradients]
