"""Broadcasts an object with tensors, each tensor by a collective of its own."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[dist.Work], None]


def broadcast(held: Any, group: dist.ProcessGroup, *, source: int, wait: Wait) -> Any:
    """Return what rank `source` holds, on every rank. `held` is None on the others.

    Only ranks of one run are trusted this far: the object around the tensors is pickled.
    """
    options = dist.BroadcastOptions()
    options.rootRank = source

    def sent(tensor: Tensor) -> Tensor:
        wait(group.broadcast([tensor], options))
        return tensor

    if held is not None:
        frame, tensors = _take_apart(held)
        header = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        sent(torch.tensor([len(header)]))
        sent(header)
        for tensor in tensors:
            sent(tensor.contiguous())
        return held
    length = int(sent(torch.zeros(1, dtype=torch.int64)))
    frame = bytes(sent(torch.zeros(length, dtype=torch.uint8)).numpy())
    return _put_together(frame, sent)


def _take_apart(held: Any) -> tuple[bytes, list[Tensor]]:
    """Return the pickled frame of `held`, and its tensors in the order of the frame's places."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: object) -> tuple[int, torch.Size, torch.dtype] | None:
            if not isinstance(one, Tensor):
                return None
            tensors.append(one.detach())
            return len(tensors) - 1, one.shape, one.dtype

    file = io.BytesIO()
    Pickler(file).dump(held)
    return file.getvalue(), tensors


def _put_together(frame: bytes, sent: Callable[[Tensor], Tensor]) -> Any:
    """Return the object of `frame`, whose tensors are received in their order."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: tuple[int, torch.Size, torch.dtype]) -> Tensor:
            _, shape, dtype = place
            return sent(torch.empty(shape, dtype=dtype))

    return Unpickler(io.BytesIO(frame)).load()
