"""Send every rank's rows of numbers to every rank.

From a GPU they go on a stream of their own, and the host fetches them only in the next watched
step, so it hardly waits. If the CPU sends them (Gloo), the host waits and fetches them at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]  # [ranks, rows, words]


def is_shared() -> bool:
    """Return whether there are other ranks to compare with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def tell(own: Any) -> list[Any]:
    """Return every rank's object `own`, by rank; a collective of all ranks."""
    if not is_shared():
        return [own]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank


class Exchange:
    """The exchange of up to `num_rows` rows of each rank, in the process group of all ranks.

    `waits` tells whether `send` returns before rows have arrived, so that `receive` waits for them.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._world = dist.get_world_size() if is_shared() else 1
        self._device = _transport(device) if is_shared() else device
        self._own: Tensor | None = None
        if device.type == "cuda" and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.waits = device.type == "cuda" and self._device.type == "cuda"

    def send(self, rows: Tensor) -> None:
        """Start to send `rows`, int64 [rows, words], which must not change before `receive`."""
        if self._own is None:
            shape = (self._num_rows, rows.shape[1])
            self._own = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._all = self._own.new_zeros((self._world, *shape))
            self._here = torch.empty(self._all.shape, dtype=torch.int64, pin_memory=self.waits)
        if not self.waits:
            self._pass(rows)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._pass(rows)
            self._arrived.record(self._stream)

    def _pass(self, rows: Tensor) -> None:
        assert self._own is not None
        self._own[: len(rows)].copy_(rows)
        if self._world > 1:
            dist.all_gather(list(self._all), self._own)
        else:
            self._all[0].copy_(self._own)
        self._here.copy_(self._all, non_blocking=self.waits)

    def has_arrived(self) -> bool:
        """Return whether `receive` would return at once."""
        return not self.waits or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def receive(self) -> Rows:
        """Return the rows that every rank sent last, int64 [ranks, rows, words].

        The host waits for them if they haven't arrived.
        """
        if self.waits:
            self._arrived.synchronize()
        return self._here.numpy().copy()


def _transport(device: torch.device) -> torch.device:
    """Return the device from which the process group sends rows that are on `device`.

    That is `device` under NCCL, else the CPU if the group has a CPU backend, else the current GPU.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if device.type == "cuda" and backends.get("cuda") == "nccl":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
