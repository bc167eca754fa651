"""Collectives of one generation, over gloo, outside of torch's global state.

torch's own functions for collectives need an initialised default group, which can't be replaced
while the script holds it. torch's stubs don't know what a group outside of it can do.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Group:
    """Ranks that are connected with one another. All make the same calls in the same order.

    A call returns at once. Its tensors are contiguous, and belong to it until its work is done.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        """Connect with the other ranks. Raises RuntimeError if one is not there in time."""
        timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def all_to_all(
        self, out: Tensor, sent: Tensor, *, received_from: list[int], sent_to: list[int]
    ) -> dist.Work:
        """Send each rank a part of `sent`, and receive a part of `out` from each, in elements."""
        work: dist.Work = self._group.alltoall_base(out, sent, received_from, sent_to)
        return work

    def all_gather(self, out: Tensor, mine: Tensor) -> dist.Work:
        """Gather all ranks' tensors in `out`, by ranks."""
        work: dist.Work = self._group._allgather_base(out, mine)
        return work

    def broadcast(self, tensor: Tensor, *, source: int) -> dist.Work:
        """Copy the tensor of rank `source` to all others."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        work: dist.Work = self._group.broadcast([tensor], options)
        return work
