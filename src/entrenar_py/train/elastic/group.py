"""Collectives of one generation, over gloo or NCCL, outside of torch's global state.

torch's own functions for collectives need an initialised default group, which can't be replaced
while the script holds it. torch's stubs don't know what a group outside of it can do.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py.shared.errors import SystemFailure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# torch's own watchdog would end the process, or the group, before the ranks have agreed. And a host
# that waits in NCCL can't notice a death.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_FOREVER = timedelta(days=365)


class Started(ABC):
    """A collective that was started."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether it can't read or write memory any more. Doesn't wait."""

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if it has failed. Call it when it is over."""


class Group(ABC):
    """Ranks that are connected with one another. All make the same calls in the same order.

    A call returns at once. Its tensors are contiguous, on `device`, and belong to it until it is
    over. On a GPU a call is queued on the current stream, as a kernel is: what follows on the
    stream waits for it.
    """

    device: torch.device
    _group: Any

    def all_to_all(
        self, out: Tensor, sent: Tensor, *, received_from: list[int], sent_to: list[int]
    ) -> Started:
        """Send each rank a part of `sent`, and receive a part of `out` from each, in elements."""
        return self._started(self._group.alltoall_base(out, sent, received_from, sent_to))

    def all_gather(self, out: Tensor, mine: Tensor) -> Started:
        """Gather all ranks' tensors in `out`, by ranks. This rank's may be its place in `out`."""
        return self._started(self._group._allgather_base(out, mine))

    def broadcast(self, tensor: Tensor, *, source: int) -> Started:
        """Copy the tensor of rank `source` to all others."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._started(self._group.broadcast([tensor], options))

    @abstractmethod
    def abort(self, timeout_s: float) -> None:
        """Let collectives end, as soon as they can, that wait for a rank in vain.

        Raises SystemFailure if that takes longer than `timeout_s`. The group can't be used again.
        """

    @abstractmethod
    def _started(self, work: dist.Work) -> Started:
        """Return what tells when `work` is over."""


def connect(
    store: Store, device: torch.device, *, rank: int, world_size: int, timeout_s: float
) -> Group:
    """Connect with the other ranks. Raises RuntimeError if one is not there in time."""
    kind = _Nccl if device.type == "cuda" else _Gloo
    return kind(store, device, rank=rank, world_size=world_size, timeout_s=timeout_s)


def prepare(device: torch.device) -> None:
    """Set what groups on `device` need in this process, before the first one."""
    if device.type == "cuda":
        os.environ.update(_NCCL_SETTINGS)


class _OfHost(Started):
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_over(self) -> bool:
        return self._work.is_completed()

    def check(self) -> None:
        self._work.wait()


class _Gloo(Group):
    def __init__(
        self, store: Store, device: torch.device, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.device = device
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))

    def abort(self, timeout_s: float) -> None:
        """Do nothing: gloo's collectives end when they time out, and may write until then."""

    def _started(self, work: dist.Work) -> Started:
        return _OfHost(work)


class _OnStream(Started):
    """A place in a stream's queue."""

    def __init__(self, work: dist.Work) -> None:
        work.wait()  # makes the current stream wait, not the host
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Do nothing: a collective of NCCL that can't go on is never over, unless aborted."""


class _Nccl(Group):
    def __init__(
        self, store: Store, device: torch.device, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.device = device
        torch.cuda.set_device(device)  # of this thread
        kind: Any = dist.ProcessGroupNCCL
        # High priority: queued after the many kernels of the backward pass, the links would idle.
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = _FOREVER  # the members notice
        self._group = kind(store, rank, world_size, options)
        self._group.eager_connect_single_device(device)

    def abort(self, timeout_s: float) -> None:
        """Abort in a thread, and wait for the kernels to end."""

        def abort() -> None:
            torch.cuda.set_device(self.device)
            self._group.abort()
            torch.cuda.synchronize()

        thread = threading.Thread(target=abort, name="entrenar-elastic-abort", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            raise SystemFailure(
                f"NCCL could not abort its collectives within {timeout_s:g} s: this rank ends, and "
                "its supervisor starts another"
            )

    def _started(self, work: dist.Work) -> Started:
        return _OnStream(work)
