"""`exchange.all_reduce`, on GPUs of one host that see each other's memory: one kernel does it all.

Each rank reads its chunk of a piece from all ranks' memory, adds along the tree, and writes the sum
to all of them: reads and writes cross the links at the same time, and nothing is received in
between. Pieces are copied in and out of that memory while others are under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.futures import Future

from entrenar_py.canonical import kernels
from entrenar_py.canonical.exchange import ALIGNMENT

# One is copied in, one reduced, one copied out.
_NUM_SLOTS = 3
# Few enough that a backward pass keeps most of the device, many enough to fill the links.
NUM_PROGRAMS = 64


@dataclass(frozen=True)
class _Slot:
    """A piece's place in every rank's memory; `free` comes true once it was copied out of here."""

    memory: Tensor  # uint8, this rank's
    peers: Tensor  # int64 [num_ranks]: addresses of all ranks' memory
    free: torch.cuda.Event


class Symmetric:
    """Calls follow each other on every rank in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        self._memory = symmetric_memory.empty(
            _NUM_SLOTS * piece_bytes, dtype=torch.uint8, device=device
        )
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        self._filling, self._reducing, self._emptying = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._slots = deque(self._slot(index) for index in range(_NUM_SLOTS))

    def __call__(self, buffer: Tensor) -> Future[Tensor]:
        """What `buffer` becomes; it may be touched again once the future was waited for."""
        self._filling.wait_stream(torch.cuda.current_stream(self._device))
        waiting: tuple[_Slot, Tensor] | None = None
        for piece in torch.split(buffer, self._piece_bytes // buffer.element_size()):
            self._slots.rotate(-1)
            slot = self._slots[0]
            local = slot.memory.view(buffer.dtype)[: len(piece)]
            self._fill(slot, local, piece)
            self._meet()
            if waiting is not None:
                self._empty(*waiting)
            self._add(slot, local)
            waiting = slot, piece
        if waiting is not None:
            self._meet()
            self._empty(*waiting)
        future: Future[Tensor] = Future(devices=[self._device])
        with torch.cuda.stream(self._emptying):
            future.set_result(buffer)
        return future

    def _slot(self, index: int) -> _Slot:
        start = index * self._piece_bytes
        sizes = (_NUM_SLOTS * self._piece_bytes,)
        everyone = [
            self._handle.get_buffer(rank, sizes, torch.uint8).data_ptr() + start
            for rank in range(self._world_size)
        ]
        return _Slot(
            memory=self._memory[start : start + self._piece_bytes],
            peers=torch.tensor(everyone, device=self._device),
            free=torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )

    def _fill(self, slot: _Slot, local: Tensor, piece: Tensor) -> None:
        with torch.cuda.stream(self._filling):
            self._filling.wait_event(slot.free)
            local.copy_(piece)

    def _meet(self) -> None:
        """On the GPUs: every rank has filled what it was told to, and added what it was told to."""
        self._reducing.wait_stream(self._filling)
        with torch.cuda.stream(self._reducing):
            self._handle.barrier(channel=0)
        self._emptying.wait_stream(self._reducing)

    def _add(self, slot: _Slot, local: Tensor) -> None:
        """This rank's chunk of the piece, for everyone."""
        chunk = -(-len(local) // (self._world_size * ALIGNMENT)) * ALIGNMENT
        start = min(self._rank * chunk, len(local))
        stop = min(start + chunk, len(local))
        with torch.cuda.stream(self._reducing):
            kernels.add_tree_of_peers(
                slot.peers,
                local=local,
                start=start,
                stop=stop,
                scale=self._scale,
                num_programs=NUM_PROGRAMS,
            )

    def _empty(self, slot: _Slot, piece: Tensor) -> None:
        with torch.cuda.stream(self._emptying):
            piece.copy_(slot.memory.view(piece.dtype)[: len(piece)])
            slot.free.record()
