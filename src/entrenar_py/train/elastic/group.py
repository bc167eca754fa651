"""Collectives of one generation, over gloo or NCCL, outside of torch's global state.

torch's own functions for collectives need an initialised default group, which can't be replaced
while the script holds it. torch's stubs don't know what a group outside of it can do.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrenar_py.shared.errors import SystemFailure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# torch's watchdog would end the process, or the group, before the ranks have agreed. A host that
# blocks in a collective can't notice a death: neither in torch's wait, nor in NCCL, which otherwise
# connects ranks only when a collective needs it.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "NCCL_RUNTIME_CONNECT": "0",
}
_FOREVER = timedelta(days=365)
_POLL_S = 0.001


class ConnectionLostError(Exception):
    """Raised when a collective could not be started, or has failed."""


class Started(ABC):
    """A collective that was started."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether it can't read or write memory any more. Doesn't wait."""

    @abstractmethod
    def check(self) -> None:
        """Raise ConnectionLostError if it has failed. Call it when it is over."""


class Group(ABC):
    """Ranks that are connected with one another. All make the same calls in the same order.

    A call returns at once, and raises ConnectionLostError if it can't start. Its tensors are
    contiguous, on `device`, and belong to it until it is over. On a GPU a call is queued on the
    current stream, as a kernel is: what follows on the stream waits for it.
    """

    device: torch.device
    _group: Any

    def all_to_all(
        self, out: Tensor, sent: Tensor, *, received_from: list[int], sent_to: list[int]
    ) -> Started:
        """Send each rank a part of `sent`, and receive a part of `out` from each, in elements."""
        return self._start(lambda: self._group.alltoall_base(out, sent, received_from, sent_to))

    def swap(self, received: list[Tensor], sent: list[Tensor]) -> Started:
        """Send each rank the tensor at its place, and receive one from each. Not over gloo."""
        return self._start(lambda: self._group.alltoall(received, sent))

    def all_gather(self, out: Tensor, mine: Tensor) -> Started:
        """Gather all ranks' tensors in `out`, by ranks. This rank's may be its place in `out`."""
        return self._start(lambda: self._group._allgather_base(out, mine))

    def broadcast(self, tensor: Tensor, *, source: int) -> Started:
        """Copy the tensor of rank `source` to all others."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._start(lambda: self._group.broadcast([tensor], options))

    @abstractmethod
    def abort(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Let collectives end that wait for a rank, and wait until `is_over` says that they have.

        What ends from now on may be garbage, on the other ranks, too. The group can't be used
        again. Raises SystemFailure if it takes longer than `timeout_s`.
        """

    def _start(self, call: Callable[[], dist.Work]) -> Started:
        try:
            return self._started(call())
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # errors of this rank, which would come again
        except RuntimeError as error:
            raise ConnectionLostError(f"an exchange could not start: {error}") from error

    @abstractmethod
    def _started(self, work: dist.Work) -> Started:
        """Return what tells when `work` is over."""


def connect(
    store: Store,
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    announce: Callable[[NcclGroup], None],
) -> Group:
    """Connect with the other ranks. Raises RuntimeError if one is not there in time.

    Over NCCL it may wait for ever if one ends meanwhile, unless the group that `announce` gets
    before is cut.
    """
    if device.type != "cuda":
        return _Gloo(store, device, rank=rank, world_size=world_size, timeout_s=timeout_s)
    group = NcclGroup(store, device, rank=rank, world_size=world_size)
    announce(group)
    group.connect_all()
    return group


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
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ConnectionLostError(f"an exchange between ranks failed: {error}") from error


class _Gloo(Group):
    def __init__(
        self, store: Store, device: torch.device, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self.device = device
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))

    def abort(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Do nothing: gloo's collectives end when they time out, and may write until then."""

    def _started(self, work: dist.Work) -> Started:
        return _OfHost(work)


class _OnStream(Started):
    """A place in the queue of the current stream."""

    def __init__(self, work: dist.Work, group: NcclGroup) -> None:
        self._group = group
        work.wait()  # makes the stream wait, not the host
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(group.device))

    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def check(self) -> None:
        # One that can't go on is never over, unless it was cut. Then it is over without a result.
        if self._group.is_cut:
            raise ConnectionLostError("an exchange between ranks was cut")

    def block(self) -> None:
        """Wait until it is over, on the calling thread."""
        self._event.synchronize()


class NcclGroup(Group):
    """A group over NCCL. Any thread may cut it."""

    def __init__(self, store: Store, device: torch.device, *, rank: int, world_size: int) -> None:
        self.device, self._rank, self._world_size = device, rank, world_size
        self.is_cut, self._cutting = False, threading.Lock()
        self._is_starting = False
        self._last: _OnStream | None = None
        torch.cuda.set_device(device)  # of this thread
        kind: Any = dist.ProcessGroupNCCL
        # High priority: queued after the many kernels of the backward pass, the links would idle.
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = _FOREVER  # the members notice
        self._group = kind(store, rank, world_size, options)

    def connect_all(self) -> None:
        """Connect with all ranks, for all collectives. Raises ConnectionLostError if it was cut."""
        self._require_whole()
        self._group.eager_connect_single_device(self.device)
        self._require_whole()
        # The first collective of a kind connects ranks, and blocks its caller until all are there.
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            row, ones = torch.zeros(self._world_size, device=self.device), [1] * self._world_size
            self.all_to_all(torch.empty_like(row), row, received_from=ones, sent_to=ones)
            self.all_gather(row, row[self._rank : self._rank + 1])
            self.broadcast(row, source=0)
        stream.synchronize()

    def _require_whole(self) -> None:
        if self.is_cut:
            raise ConnectionLostError("the group was cut before it was connected")

    def wait(self) -> None:
        """Wait, on the calling thread, until all collectives are over that were started."""
        # Not by asking the driver: torch holds the interpreter's lock while it asks.
        while self._is_starting:
            time.sleep(_POLL_S)
        if self._last is not None:
            self._last.block()

    def cut(self) -> None:
        """Do what `abort` does, without waiting, once."""
        with self._cutting:
            if not self.is_cut:
                self.is_cut = True  # before it takes effect
                torch.cuda.set_device(self.device)  # of this thread
                self._group.abort()

    def abort(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        raised: list[Exception] = []

        def abort() -> None:
            try:
                self.cut()
                while not is_over():  # not all of the GPU: a group of the script's may wait, too
                    time.sleep(_POLL_S)
            except Exception as error:  # noqa: BLE001  # raised below, in the caller's thread
                raised.append(error)

        thread = threading.Thread(target=abort, name="entrenar-elastic-abort", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if raised or thread.is_alive():
            why = f": {raised[0]}" if raised else f" within {timeout_s:g} s"
            raise SystemFailure(
                f"NCCL could not abort its collectives{why}; this rank ends, and its supervisor "
                "starts another"
            )

    def _start(self, call: Callable[[], dist.Work]) -> Started:
        self._is_starting = True
        try:
            return super()._start(call)
        finally:
            self._is_starting = False

    def _started(self, work: dist.Work) -> Started:
        self._last = _OnStream(work, self)
        return self._last
