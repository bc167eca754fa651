"""The buffers of a model, and which of them depend on this rank's own samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import dtensors, tensors

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Buffers:
    """The buffers of a model that are recorded.

    A buffer that a forward pass changes (BatchNorm's running statistics) rightly differs between
    ranks: it is local, and no rank's copy of it is compared with another's, unless it is
    `synchronised`. Changes are found by comparing values, since writes through `.data` don't change
    a tensor's version. Buffers are looked up by name each time, as a script may replace them. If a
    script calls only parts of the model, it is unknown which are local.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._called = False
        self._local: set[str] = set()
        # Given the names of all buffers, returns those that the script declares synchronised.
        self.synchronised: Callable[[Iterable[str]], Collection[str]] = lambda _: ()

    def before_forward(self) -> None:
        """Copy the buffers that a forward pass may change."""
        self._before = {
            name: dtensors.local(buffer).clone()
            for name, buffer in self._all().items()
            if name not in self._local
        }

    def after_forward(self) -> list[str] | None:
        """Return the names of buffers that this pass was the first to change.

        After any pass but the first, None is returned in place of an empty list.
        """
        first, buffers = not self._called, self._all()
        synced = _synchronised(self._model).union(self.synchronised(buffers))
        changed = [
            name
            for name, buffer in buffers.items()
            if name not in self._local | synced and not _same(self._before.get(name), buffer)
        ]
        self._local.update(changed)
        self._called = True
        return changed if changed or first else None

    def held(self) -> dict[str, Tensor]:
        """Return by name all buffers but the local ones that are never saved, such as caches."""
        unsaved = self._local & _unsaved(self._model)
        return {name: buffer for name, buffer in self._all().items() if name not in unsaved}

    def names(self) -> list[str]:
        """Return the names of all buffers that can be recorded."""
        return [*self._all()]

    def _all(self) -> dict[str, Tensor]:
        """Return by name the dense buffers that are neither lazy nor quantised."""
        return {
            tensors.plain_name(name): buffer
            for name, buffer in self._model.named_buffers()
            if type(buffer) in (Tensor, DTensor)
            and buffer.dtype in (*_FLOATS, *_WHOLE)
            and buffer.layout is torch.strided
            and not buffer.is_meta
        }


def _unsaved(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not persistent: no state dict has them."""
    return {
        tensors.plain_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _same(before: Tensor | None, buffer: Tensor) -> bool:
    """Return whether a buffer has the values that it had before, where NaN equals NaN."""
    now = dtensors.local(buffer)
    if before is None or (before.dtype, before.device, before.shape) != (
        *(now.dtype, now.device, now.shape),
    ):
        return False
    both_nan = before.isnan() & now.isnan()
    return bool(((before == now) | both_nan).all())


def _synchronised(model: nn.Module) -> set[str]:
    """Return the names of buffers that a forward pass changes on all ranks alike.

    These are the buffers of each SyncBatchNorm whose process group has all ranks.
    """
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            group = module.process_group
            if group is None or dist.get_world_size(group) == dist.get_world_size():
                names |= {tensors.plain_name(name) for name, _ in module.named_buffers(path)}
    return names
