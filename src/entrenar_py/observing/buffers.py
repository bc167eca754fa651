"""Which buffers of a model are recorded: those that every rank is to hold alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.observing import dtensors, tensors

# What a record can hold; a quantised tensor, or one that has no shape yet, is of another type.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Buffers:
    """The floating ones, looked up by name each time: they may be replaced by new tensors.

    What a forward pass changes follows the samples of this rank, as BatchNorm's running statistics
    do, and rightly differs between ranks: such names are told, to be left out of all that any rank
    records. Its values tell, since no version counts what is written through `.data`. Of a model
    that is never called, only its parts are, this can't be known: none of its buffers counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._called = False
        self._local: set[str] = set()

    def before_forward(self) -> None:
        """Keeps a copy of what a forward pass may change."""
        self._before = {
            name: dtensors.local(one).clone()
            for name, one in self._found().items()
            if name not in self._local
        }

    def after_forward(self) -> list[str] | None:
        """The names of what the pass changed and none before it did; None if that is nothing, and
        this was not the first.
        """
        synced, first = _synchronised(self._model), not self._called
        changed = [
            name
            for name, one in self._found().items()
            if name not in self._local | synced and not _same(self._before.get(name), one)
        ]
        self._local.update(changed)
        self._called = True
        return changed if changed or first else None

    def held(self) -> dict[str, Tensor]:
        """By name, all but those that are known to be local."""
        return {name: one for name, one in self._found().items() if name not in self._local}

    def _found(self) -> dict[str, Tensor]:
        return {
            tensors.plain_name(name): one
            for name, one in self._model.named_buffers()
            if type(one) in (Tensor, DTensor)
            and one.dtype in _DTYPES
            and one.layout is torch.strided
            and not one.is_meta
        }


def _same(before: Tensor | None, one: Tensor) -> bool:
    """Whether these are equal bit for bit, where NaN equals NaN."""
    now = dtensors.local(one)
    if before is None or (before.dtype, before.device, before.shape) != (
        *(now.dtype, now.device, now.shape),
    ):
        return False
    both_nan = before.isnan() & now.isnan()
    return bool(((before == now) | both_nan).all())


def _synchronised(model: nn.Module) -> set[str]:
    """The buffers that a forward pass changes on all ranks alike: SyncBatchNorm's, unless its
    group is a part of them.
    """
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and _is_everyone(module.process_group):
            for name, _ in module.named_buffers(path):
                names.add(tensors.plain_name(name))
    return names


def _is_everyone(group: Any) -> bool:
    return group is None or dist.get_world_size(group) == dist.get_world_size()
