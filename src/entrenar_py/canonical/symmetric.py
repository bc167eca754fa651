"""`exchange.all_reduce`, on GPUs of one host that see each other's memory: copy engines carry it.

Each rank puts the other ranks' chunks of a piece into their memory, adds along the tree what was
put into its own, and takes the sums from theirs. The processors that compute only add: what travels
is copied by engines that do nothing else, beside the backward pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.futures import Future

from entrenar_py.canonical import kernels
from entrenar_py.canonical.exchange import ALIGNMENT

# One is put into while the other is added, then taken from.
_NUM_SLOTS = 2
_TIMEOUT_MS = 600_000  # of a rank that waits for the others, as NCCL's usual one


@dataclass(frozen=True)
class _Slot:
    """A piece's place on every rank: rows put there by the ranks, and the sum of its chunk.

    `put` is uint8 [num_ranks, chunk_bytes] and `sums` uint8 [chunk_bytes], of each rank.
    """

    put: list[Tensor]
    sums: list[Tensor]


@dataclass(frozen=True)
class _Piece:
    """The work for a piece of a buffer: pairs (to, from) that are copied, and what is added."""

    puts: list[tuple[Tensor, Tensor]]
    takes: list[tuple[Tensor, Tensor]]
    rows: Tensor  # uint8 [num_ranks, chunk_bytes], this rank's
    mine: Tensor  # this rank's chunk, in its place; may be empty
    sums: Tensor  # where the others take it from


@dataclass
class _Plan:
    """The work for a bucket, and the call in which it was done last.

    The first time it is started piece by piece, the second time recorded, and from then on the
    recording is started: that is one thing for the host to do instead of fifty, and a small bucket
    takes no longer than that.
    """

    pieces: list[_Piece]
    call: int
    times: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Symmetric:
    """Calls follow each other on every rank in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        self._chunk_bytes = piece_bytes // self._world_size
        size = _NUM_SLOTS * (piece_bytes + self._chunk_bytes)
        self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        everyone = [
            self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world_size)
        ]
        self._slots = [self._slot(everyone, index) for index in range(_NUM_SLOTS)]
        self._next = 0  # slot
        # The next rank first: no two ranks put to the same one, or take from it, at a time.
        self._others = [(self._rank + i) % self._world_size for i in range(1, self._world_size)]
        # One stream copies: what is put and what is taken would share the links anyway, and ranks
        # whose copies come in another order meet at the same one's door.
        self._copying, self._adding = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # Buckets come again in every step; to cut them anew takes longer than to start the copies.
        self._plans: OrderedDict[tuple[int, int, torch.dtype, int], _Plan] = OrderedDict()
        self._calls = 0

    def __call__(self, buffer: Tensor) -> Future[Tensor]:
        """Start the sum of `buffer` over all ranks, in place; wait before you touch it again."""
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            plan = self._plan(buffer)
            if plan.times == 1:
                plan.graph = self._recorded(plan.pieces)
            if plan.graph is None:
                self._start(plan.pieces)
            else:
                plan.graph.replay()
            plan.times += 1
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future

    def _recorded(self, pieces: Sequence[_Piece]) -> torch.cuda.CUDAGraph:
        """Record what `_start` would start. Other threads go on as if nothing were recorded."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._start(pieces)
        finally:
            graph.capture_end()
        return graph

    def _start(self, pieces: Sequence[_Piece]) -> None:
        """On the copying stream, which is the current one."""
        waiting: _Piece | None = None
        for piece in pieces:
            _copy(piece.puts)
            self._meet()
            # Beside the copies that follow: of the sums before, and of what is put next.
            self._add(piece)
            if waiting is not None:
                _copy(waiting.takes)
            waiting = piece
        if waiting is not None:
            self._meet()
            _copy(waiting.takes)

    def _meet(self) -> None:
        """On the GPUs: every rank has put, taken and added all that it was told to by now."""
        self._adding.wait_stream(self._copying)
        with torch.cuda.stream(self._adding):
            self._handle.barrier(channel=0, timeout_ms=_TIMEOUT_MS)
        self._copying.wait_stream(self._adding)

    def _add(self, piece: _Piece) -> None:
        if len(piece.mine):
            with torch.cuda.stream(self._adding):
                kernels.add_tree_of_put(
                    piece.rows,
                    mine=piece.mine,
                    rank=self._rank,
                    scale=self._scale,
                    sums=piece.sums,
                )

    def _slot(self, everyone: list[Tensor], index: int) -> _Slot:
        start = index * (self._piece_bytes + self._chunk_bytes)
        middle, stop = start + self._piece_bytes, start + self._piece_bytes + self._chunk_bytes
        return _Slot(
            put=[one[start:middle].view(self._world_size, -1) for one in everyone],
            sums=[one[middle:stop] for one in everyone],
        )

    def _plan(self, buffer: Tensor) -> _Plan:
        """Return the work for `buffer`, in slots that follow those of the call before."""
        self._calls += 1
        key = (buffer.data_ptr(), buffer.numel(), buffer.dtype, self._next)
        if key not in self._plans:
            parts = torch.split(buffer, self._piece_bytes // buffer.element_size())
            pieces = [
                self._piece(part, self._slots[(self._next + index) % _NUM_SLOTS])
                for index, part in enumerate(parts)
            ]
            self._plans[key] = _Plan(pieces, self._calls)
        plan = self._plans[key]
        plan.call = self._calls
        self._plans.move_to_end(key)
        self._forget()
        self._next = (self._next + len(plan.pieces)) % _NUM_SLOTS
        return plan

    def _forget(self) -> None:
        """Lets go of a buffer that did not come again for two steps: torch makes new buckets after
        the first step, and a plan keeps what it is of.
        """
        key, oldest = next(iter(self._plans.items()))
        if self._calls - oldest.call > 2 * len(self._plans):
            del self._plans[key]

    def _piece(self, piece: Tensor, slot: _Slot) -> _Piece:
        """`piece` cut in a chunk for each rank; the last ones may be short, or empty."""
        size = -(-len(piece) // (self._world_size * ALIGNMENT)) * ALIGNMENT
        chunks = [piece[rank * size : (rank + 1) * size] for rank in range(self._world_size)]
        mine, others = chunks[self._rank], [rank for rank in self._others if len(chunks[rank])]
        return _Piece(
            puts=[
                (_as_chunk(slot.put[rank][self._rank], chunks[rank]), chunks[rank])
                for rank in others
            ],
            takes=[
                (chunks[rank], _as_chunk(slot.sums[rank], chunks[rank]))
                for rank in reversed(others)
            ],
            rows=slot.put[self._rank],
            mine=mine,
            sums=_as_chunk(slot.sums[self._rank], mine),
        )


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source)


def _as_chunk(memory: Tensor, chunk: Tensor) -> Tensor:
    """The head of `memory` as long as `chunk`, of its dtype."""
    return memory[: chunk.numel() * chunk.element_size()].view(chunk.dtype)
