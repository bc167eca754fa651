"""What differs between strategies: how the ranks share a model, its gradient and its state.

A rank holds whole trainable tensors, or a piece of each as DTensors, or all pieces of some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from entrenar_py.train.finetune.strategies.step import Step

Arrays = dict[str, NDArray[np.float32]]
ValueOf = Callable[[nn.Parameter], Tensor]  # a parameter itself, or its moment or gradient


class Strategy(ABC):
    """A model that is trained by all ranks together.

    `trainable` has this rank's trainable parameters, by the names that they have in the workload.
    Ranks that share rows score other ones each; else all ranks score the same ones together.
    """

    trainable: dict[str, nn.Parameter]
    device: torch.device
    shares_rows = False

    @abstractmethod
    def compute(self, step: Step) -> Tensor:
        """Leave the gradient of the step's loss, a sum divided by `step.weight`, in every `.grad`.

        Returns float64 [num_shards]: the summed losses of the shards whose loss this rank has, and
        zeros for all others. The sum over ranks is each shard's loss.
        """

    @abstractmethod
    def logits(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        """Return the logits of rows on this rank, None if another rank has those.

        Both are int64 [n, t] on the device; logits are [n, t, vocabulary] or [n, classes]. All
        ranks call it equally often, in evaluation mode and without gradients.
        """

    def squares(self) -> Tensor:
        """Return the sum of squares of the whole gradient, 0-d float64, the same on all ranks.

        The squares of pieces are added over ranks; those of copies count once.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # of pieces, of copies
        for parameter in self.trainable.values():
            gradient = local(gradient_of(parameter))
            sums[0 if is_in_pieces(parameter) else 1] += gradient.double().square().sum()
        dist.all_reduce(sums[:1])
        return sums.sum()

    def first_bad(self) -> str | None:
        """Return the name of a tensor whose gradient is not finite, the same on all ranks."""
        own = [
            name
            for name, parameter in self.trainable.items()
            if not local(gradient_of(parameter)).isfinite().all()
        ]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, own)
        return next((name for names in everyone for name in names), None)

    def whole(self, value_of: ValueOf) -> Arrays:
        """Return on rank 0 the whole tensors of what each parameter has; on others nothing.

        All ranks must call it.
        """
        arrays: Arrays = {}
        for name, parameter in self.trainable.items():
            value = value_of(parameter).detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                arrays[name] = whole.float().cpu().numpy().copy()
        return arrays

    def spread(
        self, arrays: Mapping[str, NDArray[np.float32]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return this rank's part of each of `arrays`, which rank 0 has, in the layout of its own.

        `shapes` has the names of all. All ranks must call it.
        """
        parts: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            whole = torch.empty(shape, device=self.device)
            if dist.get_rank() == 0:
                whole.copy_(torch.from_numpy(arrays[name]))
            dist.broadcast(whole, 0)
            if (parameter := self.trainable.get(name)) is not None:
                parts[name] = _as_held(whole, parameter)
        return parts


def _as_held(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's piece of `whole` if `parameter` is in pieces, else `whole`."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`; one that took no part in the loss gets zeros first."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of `tensor`, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_in_pieces(tensor: Tensor) -> bool:
    """Return whether ranks have pieces of `tensor`, rather than copies."""
    return isinstance(tensor, DTensor) and tensor.placements[0].is_shard()


def trainable_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` that are trained, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
