"""Finds what is not finite before it is reduced: afterwards all have it, and nobody is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NONE = 2**62  # the place where nothing is bad


class NotFinite(Exception):
    """The step must not be made: micro-batch `micro` of `rank` is not finite.

    In the gradient of `tensor` or, where that is None, in the loss.
    """

    def __init__(self, rank: int, micro: int, tensor: str | None) -> None:
        self.rank, self.micro, self.tensor = rank, micro, tensor
        super().__init__(f"not finite: {tensor or 'the loss'} of micro-batch {micro}, rank {rank}")

    @property
    def place(self) -> dict[str, Any]:
        """Where it is, as `Observation.halted` takes it."""
        return {"rank": self.rank, "micro_batch": self.micro, "tensor": self.tensor}


class FiniteGuard:
    """Looks at each micro-batch's own loss, and at the rank's gradients with its own added, and
    tells everyone of the first bad one.

    A flag per tensor is kept on the device: the host waits once a step, in `agree`. `names` are
    those of all ranks, where each has other tensors: then nothing is looked at before `look`.
    """

    def __init__(
        self, trainable: Mapping[str, nn.Parameter], *, names: Sequence[str] | None = None
    ) -> None:
        self._names = [None, *(names or trainable)]  # the loss is looked at first
        self._flags: list[Tensor] = []  # of each micro-batch, per name whether it is bad
        self._trainable = {self._names.index(name): p for name, p in trainable.items()}
        self._device = next(iter(trainable.values())).device
        if names is None:
            for index, parameter in self._trainable.items():
                look = partial(self._look, index)
                parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]

    def begin(self, loss: Tensor) -> None:
        """A micro-batch has this loss; its backward pass comes next."""
        flags = torch.zeros(len(self._names), dtype=torch.bool, device=self._device)
        flags[0] = ~loss.detach().isfinite()
        self._flags.append(flags)

    def look(self) -> None:
        """At the gradients that are there, of all micro-batches since `begin` together."""
        for index, parameter in self._trainable.items():
            if parameter.grad is not None:
                self._look(index, parameter)

    def agree(self) -> None:
        """Returns on every rank, or raises NotFinite on every rank, naming the same place.

        That of the lowest rank, its first micro-batch, and the first tensor there.
        """
        first = self._first()
        found = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(found, first)
        for rank, place in enumerate(int(one) for one in found):
            error = self._error(rank, place)
            if error is not None:
                raise error

    def found(self, rank: int) -> NotFinite | None:
        """Return what this rank has found, without asking the others: of its first micro-batch that
        is bad, the first tensor.
        """
        return self._error(rank, int(self._first()))

    def _first(self) -> Tensor:
        """int64 [1]: the first bad place of this rank, or _NONE; nothing is remembered of it."""
        bad = torch.stack(self._flags).flatten()
        self._flags.clear()
        places = torch.arange(len(bad), device=self._device)
        return torch.where(bad, places, _NONE).min().reshape(1)

    def _error(self, rank: int, place: int) -> NotFinite | None:
        micro, index = divmod(place, len(self._names))
        return None if place == _NONE else NotFinite(rank, micro, self._names[index])

    def _look(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self._flags[-1][index] |= ~held.isfinite().all()
