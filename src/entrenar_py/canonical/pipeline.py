"""`exchange.all_reduce`, on GPUs over NCCL: pieces overlap, and the host never waits.

Three things happen at once: chunks of piece i + 1 travel to those who add them, chunks of piece i
are added, and sums of piece i - 1 travel back. A NCCL communicator does one thing at a time, so
each direction has one of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from entrenar_py.canonical import kernels
from entrenar_py.canonical.exchange import all_gather, cut

# One is received into, one added, one to spare: a link never waits for memory.
_NUM_SLOTS = 3


@dataclass(frozen=True)
class _Slot:
    """Memory that one piece is received in; `free` comes true on the GPU once that was added."""

    memory: Tensor  # uint8
    free: torch.cuda.Event

    @classmethod
    def open(cls, num_bytes: int, device: torch.device) -> _Slot:
        """Memory of its own, free at once."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def like(self, one: Tensor, *, times: int = 1) -> Tensor:
        """`times` as many elements as `one` has, of its dtype: [times * n]."""
        return self.memory[: times * one.numel() * one.element_size()].view(one.dtype)


class Pipeline:
    """Calls follow each other on every rank in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._scatter = group
        ranks = dist.get_process_group_ranks(group)
        self._gather = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        # Ahead of the backward pass's kernels: those are many, and links stand idle meanwhile.
        self._sending, self._adding, self._ending = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._slots = deque(_Slot.open(piece_bytes, device) for _ in range(_NUM_SLOTS))

    def __call__(self, buffer: Tensor) -> Future[Tensor]:
        """Start the sum of `buffer` over all ranks, in place; wait before you touch it again.

        Every piece is as long on all ranks: all make the same calls, in the same order.
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
                work.wait()  # `ending` waits, not the host
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future

    def _reduce(self, piece: Tensor) -> dist.Work:
        """Rank r's chunk of `piece` summed on rank r, and on its way back to everyone."""
        slot = self._next_slot()
        rows, mine = slot.like(piece), piece.view(self._world_size, -1)[self._rank]
        with torch.cuda.stream(self._sending):
            self._sending.wait_event(slot.free)
            sent = dist.all_to_all_single(rows, piece, group=self._scatter, async_op=True)
        with torch.cuda.stream(self._adding):
            sent.wait()
            self._add(rows, out=mine, slot=slot)
            # In place: NCCL sees that a rank's own chunk stands where it belongs.
            return all_gather(piece, mine, group=self._gather, async_op=True)

    def _reduce_tail(self, tail: Tensor) -> None:
        """All of `tail`, from everyone to everyone, summed by everyone."""
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
