"""Parts of a step of torch's trainers: a rank's samples, and a guard against bad values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.torch.modules import Model
from entrenar_py.train.arithmetic import sharding

if TYPE_CHECKING:
    from entrenar_py.systems.torch.ranks import Rank  # which imports this module


def global_batch(scenario: Scenario, position: sharding.Position) -> sharding.Ids:
    """Return the sample ids of the step at `position`, over all ranks."""
    visit = sharding.order(scenario.num_samples, scenario.rng("order", position.epoch))
    return sharding.batch(visit, position, scenario.batch_size)


def micro_batches(rank: Rank, ids: sharding.Ids, index: int) -> list[sharding.Ids]:
    """Return the part of a global batch for rank `index`, in micro-batches; some may be empty."""
    local = sharding.cut(ids, rank.world_size)[index]
    return sharding.cut(local, rank.scenario.accumulation)


def total_weight(rank: Rank, model: Model, ids: sharding.Ids) -> float:
    """Return the weight of the global batch, in samples or tokens, by an all-reduce."""
    local = sharding.cut(ids, rank.world_size)[rank.index]
    weight = torch.tensor(model.count(local), device=rank.device)
    dist.all_reduce(weight)
    return float(weight)


def update_buffers(rank: Rank, model: Model, ids: sharding.Ids) -> None:
    """Move the running means towards the mean of the global batch, the same on all ranks."""
    totals = model.statistics(sharding.cut(ids, rank.world_size)[rank.index])
    for total in totals.values():
        dist.all_reduce(total)
    model.move_buffers(totals, len(ids))


_NONE = 2**62  # the place of a rank with finite values only


class NotFinite(Exception):
    """Raised when the gradient of `tensor` in micro-batch `micro` of `rank` is not finite.

    If `tensor` is None, the loss is not finite. The step must not be taken.
    """

    def __init__(self, rank: int, micro: int, tensor: str | None) -> None:
        self.rank, self.micro, self.tensor = rank, micro, tensor
        super().__init__(f"not finite: {tensor or 'the loss'} of micro-batch {micro}, rank {rank}")

    @property
    def place(self) -> dict[str, Any]:
        """The place as keyword arguments of `Observation.halted`."""
        return {"rank": self.rank, "micro_batch": self.micro, "tensor": self.tensor}


class FiniteGuard:
    """Checks the loss of each micro-batch, and after its backward pass the rank's gradients.

    One flag per tensor stays on the device, so the host waits only once a step, in `agree`. If
    ranks have different tensors, pass the `names` of all tensors; then only `look` checks
    gradients.
    """

    def __init__(
        self, trainable: Mapping[str, nn.Parameter], *, names: Sequence[str] | None = None
    ) -> None:
        self._names = [None, *(names or trainable)]  # None is the loss
        self._flags: list[Tensor] = []  # for each micro-batch, and each name: is it not finite?
        self._trainable = {self._names.index(name): p for name, p in trainable.items()}
        self._device = next(iter(trainable.values())).device
        if names is None:
            for index, parameter in self._trainable.items():
                look = partial(self._look, index)
                parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]

    def begin(self, loss: Tensor) -> None:
        """Check the loss of a micro-batch; call it before its backward pass."""
        flags = torch.zeros(len(self._names), dtype=torch.bool, device=self._device)
        flags[0] = ~loss.detach().isfinite()
        self._flags.append(flags)

    def look(self) -> None:
        """Check the accumulated gradients; a bad gradient counts for the last micro-batch begun."""
        for index, parameter in self._trainable.items():
            if parameter.grad is not None:
                self._look(index, parameter)

    def agree(self) -> None:
        """Raise NotFinite on all ranks, with the same place, if any rank has a non-finite value.

        The place is the lowest rank with a bad value, its first bad micro-batch and tensor.
        """
        first = self._first()
        places = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(places, first)
        for rank, place in enumerate(int(one) for one in places):
            error = self._error(rank, place)
            if error is not None:
                raise error

    def found(self, rank: int) -> NotFinite | None:
        """Return a NotFinite for this rank's first bad value, or None; without communication."""
        return self._error(rank, int(self._first()))

    def _first(self) -> Tensor:
        """Return the first bad place of this rank or _NONE, int64 [1], and clear all flags."""
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
