"""`exchange.all_reduce` on GPUs: over NCCL, or in memory that the GPUs of one host share.

In `Pipeline` three stages overlap: the chunks of piece i + 1 are sent to the ranks that add them,
the chunks of piece i are added, and the sums of piece i - 1 are gathered. A NCCL communicator runs
one operation at a time, so sending and gathering each have their own communicator.

In `Symmetric` each rank puts the other ranks' chunks of a piece into their memory, adds along the
tree the chunks that were put into its own memory, and takes the other ranks' sums from theirs. Copy
engines do all transfers in parallel with the backward pass. For a small buffer it would take longer
to start these copies than to make them. Then each rank's kernel reads all ranks' buffers instead.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.futures import Future

from entrenar_py.train.canonical import kernels, requirements
from entrenar_py.train.canonical.exchange import ALIGNMENT, all_gather, cut

# While one slot receives, another is added. The third keeps a link from waiting for memory.
_NUM_RECEIVED = 3


@dataclass(frozen=True)
class _ReceiveSlot:
    """Memory that receives one piece. The event `free` is recorded once the piece was added."""

    memory: Tensor  # uint8
    free: torch.cuda.Event

    @classmethod
    def open(cls, num_bytes: int, device: torch.device) -> _ReceiveSlot:
        """Allocate a slot that is free."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def like(self, tensor: Tensor, *, times: int = 1) -> Tensor:
        """Return the slot's first `times * tensor.numel()` elements, 1-d, in `tensor`'s dtype."""
        return self.memory[: times * tensor.numel() * tensor.element_size()].view(tensor.dtype)


class Pipeline:
    """The asynchronous all-reduce over NCCL. All ranks make the same calls in the same order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._scatter = group
        ranks = dist.get_process_group_ranks(group)
        self._gather = dist.new_group(
            ranks,
            timeout=requirements.timeout_of(group, device),
            backend="nccl",
            use_local_synchronization=True,
        )
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        # High priority: queued after the many kernels of the backward pass, the links would idle.
        self._sending, self._adding, self._ending = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self._slots = deque(_ReceiveSlot.open(piece_bytes, device) for _ in range(_NUM_RECEIVED))

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
            # In place: NCCL doesn't copy a rank's own chunk, which is already where it belongs.
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

    def _add(self, rows: Tensor, *, out: Tensor, slot: _ReceiveSlot) -> None:
        kernels.add_tree(rows.view(self._world_size, -1), scale=self._scale, out=out)
        slot.free.record()

    def _next_slot(self) -> _ReceiveSlot:
        self._slots.rotate(-1)
        return self._slots[0]


# Ranks put a piece into one slot while the sums of the other slot are computed and taken.
_NUM_SLOTS = 2
# That a rank's kernel reads from the others for a small buffer. Measured in docs/benchmarks.md.
_READ_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class _Slot:
    """Shared memory for one piece: `put[r]` and `sums[r]` are in the memory of rank r.

    `put[r]` receives the ranks' chunks, uint8 [num_ranks, chunk_bytes]. `sums[r]` receives their
    sum.
    """

    put: list[Tensor]
    sums: list[Tensor]
    addresses: Tensor  # int64 [num_ranks], of `put`


@dataclass(frozen=True)
class _Piece:
    """The work for one piece of a buffer: pairs (to, from) of tensors to copy, and rows to add."""

    puts: list[tuple[Tensor, Tensor]]
    takes: list[tuple[Tensor, Tensor]]
    rows: Tensor  # uint8 [num_ranks, chunk_bytes], put into this rank's memory
    mine: Tensor  # this rank's chunk, a view of the buffer; may be empty
    sums: Tensor  # a copy of the sum, for the other ranks to take


@dataclass(frozen=True)
class _Small:
    """The work for a small buffer: every rank adds all of it."""

    buffer: Tensor
    slot: _Slot


@dataclass
class _Plan:
    """The work for one bucket, and the number of the last call that did it.

    The first call launches the work. The second call records it as a CUDA graph, which all later
    calls replay. A replay is one launch. Without the graph there would be up to fifty launches,
    which could take longer than the work itself.
    """

    work: list[_Piece] | _Small
    call: int
    times: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Symmetric:
    """The asynchronous all-reduce in shared memory. All ranks make the same calls in one order."""

    def __init__(
        self, group: dist.ProcessGroup, *, scale: float, device: torch.device, piece_bytes: int
    ) -> None:
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._scale, self._device, self._piece_bytes = scale, device, piece_bytes
        self._timeout_ms = requirements.timeout_of(group, device) // timedelta(milliseconds=1)
        self._chunk_bytes = piece_bytes // self._world_size
        size = _NUM_SLOTS * (piece_bytes + self._chunk_bytes)
        self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        everyone = [
            self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self._world_size)
        ]
        self._slots = [self._slot(everyone, index) for index in range(_NUM_SLOTS)]
        self._next = 0  # the slot of the next piece
        # Each rank starts with the next rank, so that no two access the same rank's memory at once.
        self._others = [(self._rank + i) % self._world_size for i in range(1, self._world_size)]
        # One stream for puts and takes. With two, they would share the links without a gain, and
        # in an order that lets several ranks access the same rank's memory at once.
        self._copying, self._adding = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # Every step has the same buckets, and planning one takes longer than starting its copies.
        self._plans: OrderedDict[tuple[int, int, torch.dtype, int], _Plan] = OrderedDict()
        self._calls = 0

    def __call__(self, buffer: Tensor) -> Future[Tensor]:
        """Start to sum `buffer` over all ranks in place. Don't use it before the future is done."""
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            plan = self._plan(buffer)
            if plan.times == 1:
                plan.graph = self._recorded(plan)
            if plan.graph is None:
                self._start(plan)
            else:
                plan.graph.replay()
            plan.times += 1
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(buffer)
        return future

    def _recorded(self, plan: _Plan) -> torch.cuda.CUDAGraph:
        """Record the work of `_start` as a CUDA graph. Other threads may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._start(plan)
        finally:
            graph.capture_end()
        return graph

    def _start(self, plan: _Plan) -> None:
        """Launch a plan's work. The current stream must be the copying stream."""
        if isinstance(plan.work, _Small):
            self._read(plan.work)
        else:
            self._exchange(plan.work)

    def _read(self, small: _Small) -> None:
        """Copy the buffer to where all ranks read it, and add all ranks' copies."""
        put, buffer = small.slot.put[self._rank].view(-1), small.buffer
        # The other ranks have read what was here before, as all have met since.
        put[: buffer.nbytes].view(buffer.dtype).copy_(buffer)
        self._meet()
        kernels.add_tree_of_all(small.slot.addresses, scale=self._scale, out=buffer)

    def _exchange(self, pieces: Sequence[_Piece]) -> None:
        """Add a chunk of each piece, and let other ranks add the other chunks."""
        waiting: _Piece | None = None
        for piece in pieces:
            _copy(piece.puts)
            self._meet()
            # Overlaps the next copies: the takes of the previous piece and the next piece's puts.
            self._add(piece)
            if waiting is not None:
                _copy(waiting.takes)
            waiting = piece
        if waiting is not None:
            self._meet()
            _copy(waiting.takes)

    def _meet(self) -> None:
        """Make the GPUs wait until all ranks have done all copies and additions launched so far."""
        self._adding.wait_stream(self._copying)
        with torch.cuda.stream(self._adding):
            self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        self._copying.wait_stream(self._adding)

    def _add(self, piece: _Piece) -> None:
        if len(piece.mine):
            with torch.cuda.stream(self._adding):
                kernels.add_tree_of_put(
                    piece.rows, mine=piece.mine, rank=self._rank, scale=self._scale, sums=piece.sums
                )

    def _slot(self, everyone: list[Tensor], index: int) -> _Slot:
        start = index * (self._piece_bytes + self._chunk_bytes)
        middle, stop = start + self._piece_bytes, start + self._piece_bytes + self._chunk_bytes
        places = [memory[start:middle].data_ptr() for memory in everyone]
        return _Slot(
            put=[memory[start:middle].view(self._world_size, -1) for memory in everyone],
            sums=[memory[middle:stop] for memory in everyone],
            addresses=torch.tensor(places, device=self._device),
        )

    def _plan(self, buffer: Tensor) -> _Plan:
        """Return the work for `buffer`. Its first slot follows the previous call's last slot."""
        self._calls += 1
        key = (buffer.data_ptr(), buffer.numel(), buffer.dtype, self._next)
        if key not in self._plans:
            self._plans[key] = self._new_plan(buffer)
        plan = self._plans[key]
        plan.call = self._calls
        self._plans.move_to_end(key)
        self._forget()
        num_slots = 1 if isinstance(plan.work, _Small) else len(plan.work)
        self._next = (self._next + num_slots) % _NUM_SLOTS
        return plan

    def _new_plan(self, buffer: Tensor) -> _Plan:
        if (self._world_size - 1) * buffer.nbytes <= min(_READ_BYTES_MAX, self._piece_bytes):
            return _Plan(_Small(buffer, self._slots[self._next]), self._calls)
        parts = torch.split(buffer, self._piece_bytes // buffer.element_size())
        pieces = [
            self._piece(part, self._slots[(self._next + index) % _NUM_SLOTS])
            for index, part in enumerate(parts)
        ]
        return _Plan(pieces, self._calls)

    def _forget(self) -> None:
        """Drop the least recently used plan, and with it its buffer, after two steps without use.

        torch creates new buckets after the first step.
        """
        key, oldest = next(iter(self._plans.items()))
        if self._calls - oldest.call > 2 * len(self._plans):
            del self._plans[key]

    def _piece(self, piece: Tensor, slot: _Slot) -> _Piece:
        """Cut `piece` into one chunk for each rank. The last chunks may be shorter, or empty."""
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
    return memory[: chunk.numel() * chunk.element_size()].view(chunk.dtype)
