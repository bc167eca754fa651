"""`exchange.all_reduce` on GPUs over NCCL, asynchronous and pipelined.

Three stages overlap: the chunks of piece i + 1 are sent to the ranks that add them, the chunks of
piece i are added, and the sums of piece i - 1 are gathered. A NCCL communicator runs one operation
at a time, so sending and gathering use a communicator each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from entrenar_py.train.canonical import kernels
from entrenar_py.train.canonical.exchange import all_gather, cut

# One slot receives and one is added. The third keeps a link from waiting for memory.
_NUM_SLOTS = 3


@dataclass(frozen=True)
class _Slot:
    """Receive memory for one piece. The event `free` is recorded after the piece was added."""

    memory: Tensor  # uint8
    free: torch.cuda.Event

    @classmethod
    def open(cls, num_bytes: int, device: torch.device) -> _Slot:
        """Allocate a slot that is free."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def like(self, tensor: Tensor, *, times: int = 1) -> Tensor:
        """Return the slot's first `times * tensor.numel()` elements, 1-d, in `tensor`'s dtype."""
        return self.memory[: times * tensor.numel() * tensor.element_size()].view(tensor.dtype)


class Pipeline:
    """The asynchronous all-reduce. All ranks make the same calls in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._scatter = group
        ranks = dist.get_process_group_ranks(group)
        self._gather = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        # High priority: behind the many kernels of the backward pass, the links would stand idle.
        self._sending, self._adding, self._ending = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._slots = deque(_Slot.open(piece_bytes, device) for _ in range(_NUM_SLOTS))

    def __call__(self, buffer: Tensor) -> Future[Tensor]:
        """Start to sum `buffer` over all ranks in place. Don't use it before the future is done.

        `buffer` must have the same length on all ranks.
        """
        piece_max = self._piece_bytes // buffer.element_size()
        plan = cut(len(buffer), world_size=self._world_size, piece_max=piece_max)
        self._sending.wait_stream(torch.cuda.current_stream(self._device))
        works = [self._reduce(buffer[one.start : one.stop]) for one in plan.pieces]
        if plan.tail:
            self._reduce_tail(buffer[plan.tail.start :])
        self._ending.wait_stream(self._adding)
        with torch.cuda.stream(self._ending):
            for work in works:
                work.wait()  # makes the stream `_ending` wait, not the host
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future

    def _reduce(self, piece: Tensor) -> dist.Work:
        """Sum this rank's chunk of `piece` over all ranks, and start to gather all chunks' sums."""
        slot = self._next_slot()
        rows, mine = slot.like(piece), piece.view(self._world_size, -1)[self._rank]
        with torch.cuda.stream(self._sending):
            self._sending.wait_event(slot.free)
            sent = dist.all_to_all_single(rows, piece, group=self._scatter, async_op=True)
        with torch.cuda.stream(self._adding):
            sent.wait()
            self._add(rows, out=mine, slot=slot)
            # In place: NCCL doesn't copy a rank's own chunk, which is in its place already.
            return all_gather(piece, mine, group=self._gather, async_op=True)

    def _reduce_tail(self, tail: Tensor) -> None:
        """Gather the tail of all ranks, and add the whole tail on every rank."""
        slot = self._next_slot()
        rows = slot.like(tail, times=self._world_size)
        with torch.cuda.stream(self._sending):
            self._sending.wait_event(slot.free)
            sent = all_gather(rows, tail, group=self._gather, async_op=True)
        with torch.cuda.stream(self._adding):
            sent.wait()
            self._add(rows, out=tail, slot=slot)

    def _add(self, rows: Tensor, *, out: Tensor, slot: _Slot) -> None:
        kernels.add_tree(rows.view(self._world_size, -1), scale=self._scale, out=out)
        slot.free.record()

    def _next_slot(self) -> _Slot:
        self._slots.rotate(-1)
        return self._slots[0]
