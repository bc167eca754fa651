"""The passes of one stage on a device of torch: forward, and backward through what was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from entrenar_py.train.arithmetic.tensors import Array, DropFunction
from entrenar_py.train.stages.stage_workload import Received, StageWorkload


@dataclass(frozen=True)
class Hidden:
    """Hidden states of a shard, [n, t, d] on the host; the next stage's draws begin at `draws`."""

    tensor: Tensor
    draws: int


@dataclass(frozen=True)
class Backward:
    """The gradients that one shard has in a stage.

    `gradients` are those of the trainable tensors in the specs' order, on the host and times the
    scale. `hidden` is that of the hidden states that came in, None in the first stage. `loss` is
    the summed loss, 0 in any stage but the last.
    """

    gradients: list[Array]
    hidden: Tensor | None
    loss: float = 0.0


class StageStep(Protocol):
    """The passes of a stage. Shards are told apart by number; `begin` forgets them all."""

    def begin(self) -> None:
        """Begin a step, or begin it anew: weights may have changed."""
        ...

    def forward(
        self, shard: int, ids: Sequence[int], received: Received | None, drop: DropFunction
    ) -> Hidden | Backward:
        """Make the forward pass of `shard`; in the last stage the backward pass, too."""
        ...

    def backward(self, shard: int, gradient: Tensor) -> Backward:
        """Make the backward pass, of which `gradient`, that of the hidden states sent on, is the
        beginning.
        """
        ...


class TorchStage:
    """A `StageStep` by autograd, on the CPU or a CUDA device."""

    def __init__(
        self,
        workload: StageWorkload,
        tensors: Mapping[str, Tensor],
        *,
        place: torch.device,
        scale: float,
    ) -> None:
        self._workload, self._place, self._scale = workload, place, scale
        self._host = dict(tensors)
        self._names = [spec.name for spec in workload.specs]
        self._tensors = self._host
        self._kept: dict[int, tuple[Tensor | None, Tensor]] = {}  # shard -> what came in, and out
        if place.type != "cpu":
            workload.objective.to(place)
            self._tensors = {
                name: one.detach().to(place).requires_grad_() for name, one in tensors.items()
            }

    def begin(self) -> None:
        """See `StageStep`."""
        self._kept.clear()
        if self._tensors is not self._host:
            with torch.no_grad():
                for name, one in self._tensors.items():
                    one.copy_(self._host[name])

    def forward(
        self, shard: int, ids: Sequence[int], received: Received | None, drop: DropFunction
    ) -> Hidden | Backward:
        """See `StageStep`."""
        came = None
        if received is not None:
            hidden = received.hidden.to(self._place).detach().requires_grad_()
            came = Received(hidden, received.draws)
        found, draws = self._workload.output_of(
            self._tensors, self._workload.batch(ids), came, drop=drop, place=self._place
        )
        into = None if came is None else came.hidden
        if not self._workload.stage.is_last:
            self._kept[shard] = into, found
            return Hidden(found.detach().contiguous().cpu(), draws)
        # In one process the scale multiplies the loss, and so do all bits of the gradient here.
        scaled = found * torch.tensor(self._scale, device=found.device)
        return self._through(scaled, None, into, loss=found.item())

    def backward(self, shard: int, gradient: Tensor) -> Backward:
        """See `StageStep`."""
        into, out = self._kept.pop(shard)
        return self._through(out, gradient.to(self._place), into)

    def _through(
        self, out: Tensor, gradient: Tensor | None, into: Tensor | None, *, loss: float = 0.0
    ) -> Backward:
        leaves: list[Tensor] = [self._tensors[name] for name in self._names]
        wanted: list[Any] = leaves if into is None else [*leaves, into]
        found = torch.autograd.grad(out, wanted, gradient)
        of_hidden = None if into is None else found[-1].contiguous().cpu()
        gradients = [one.cpu().numpy() for one in found[: len(leaves)]]
        return Backward(gradients, of_hidden, loss)
