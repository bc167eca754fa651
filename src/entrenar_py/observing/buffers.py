"""The buffers of a model that are recorded: those that should be equal on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from entrenar_py.observing import dtensors, tensors

# The dtypes that a record can hold.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Buffers:
    """The floating-point buffers of a model, without those that depend on this rank's samples.

    A buffer that a forward pass changes (BatchNorm's running statistics) rightly differs between
    ranks: it is local, and no rank's copy of it is compared. Changes are found by comparing values,
    since writes through `.data` don't change a tensor's version. Buffers are looked up by name each
    time, as a script may replace them. If a script calls only parts of the model, nothing is known
    of the buffers, and none is compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._called = False
        self._local: set[str] = set()

    def before_forward(self) -> None:
        """Copy the buffers that a forward pass may change."""
        self._before = {
            name: dtensors.local(buffer).clone() for name, buffer in self.held().items()
        }

    def after_forward(self) -> list[str] | None:
        """Return the names of buffers that this pass was the first to change.

        After any pass but the first, None is returned in place of an empty list.
        """
        synced, first = _synchronised(self._model), not self._called
        changed = [
            name
            for name, buffer in self._all().items()
            if name not in self._local | synced and not _same(self._before.get(name), buffer)
        ]
        self._local.update(changed)
        self._called = True
        return changed if changed or first else None

    def held(self) -> dict[str, Tensor]:
        """Return by name all buffers that are not known to be local."""
        return {name: buffer for name, buffer in self._all().items() if name not in self._local}

    def _all(self) -> dict[str, Tensor]:
        """Return by name the dense buffers that are neither lazy nor quantised."""
        return {
            tensors.plain_name(name): buffer
            for name, buffer in self._model.named_buffers()
            if type(buffer) in (Tensor, DTensor)
            and buffer.dtype in _DTYPES
            and buffer.layout is torch.strided
            and not buffer.is_meta
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
