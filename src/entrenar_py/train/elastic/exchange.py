"""The canonical all-reduce for any number of ranks. Each holds one node of the tree, or more.

M micro-batches are dealt to W ranks in blocks of nearly equal size. A block is covered by one node
of the binary tree, or by several if it is no subtree. Rank r adds the r-th chunk of all ranks'
nodes. The sums are those of `canonical.exchange.all_reduce`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from entrenar_py.train.canonical.exchange import ALIGNMENT
from entrenar_py.train.canonical.reducer import are_siblings
from entrenar_py.train.elastic.group import Group, Started

Wait = Callable[[Started], None]


def share(micro_batches: int, *, rank: int, world_size: int) -> range:
    """Return the micro-batches of `rank`."""
    return range(rank * micro_batches // world_size, (rank + 1) * micro_batches // world_size)


def nodes(shards: Iterable[int]) -> list[range]:
    """Return the fewest nodes, given by their leaves, that cover the neighbouring `shards`."""
    stack: list[range] = []
    for shard in shards:
        span = range(shard, shard + 1)
        while stack and are_siblings(stack[-1], span):
            span = range(stack.pop().start, span.stop)
        stack.append(span)
    return stack


def add_nodes(rows: Tensor, spans: list[range]) -> Tensor:
    """Return the sum [n] of `rows` [num_nodes, n] along the tree.

    Row i is the node `spans[i]`. All of them together are the tree's leaves, in order. Each
    addition rounds to the dtype of `rows`.
    """
    stack: list[tuple[range, Tensor]] = []
    for span, row in zip(spans, rows, strict=True):
        while stack and are_siblings(stack[-1][0], span):
            left, older = stack.pop()
            span, row = range(left.start, span.stop), older + row
        stack.append((span, row))
    ((_, root),) = stack
    return root


class Exchange:
    """The sums of one generation of ranks over `group`, which is None for a single rank."""

    def __init__(
        self, group: Group | None, *, rank: int, world_size: int, micro_batches: int
    ) -> None:
        shares = [
            share(micro_batches, rank=other, world_size=world_size) for other in range(world_size)
        ]
        self.shards = shares[rank]
        self._nodes = [nodes(shards) for shards in shares]  # by rank
        self._group, self._rank, self._world_size = group, rank, world_size
        self._is_even = micro_batches % world_size == 0  # then each rank holds one node, as large
        self._scale = 1 / micro_batches
        self._stream: torch.cuda.Stream | None = None
        if group is not None and group.device.type == "cuda":
            # High priority, as that of the group.
            self._stream = torch.cuda.Stream(group.device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def num_rows(self) -> int:
        """How many nodes this rank holds."""
        return len(self._nodes[self._rank])

    def padded(self, num_elements: int) -> int:
        """Return the length of a row that holds `num_elements` and divides among the ranks."""
        unit = self._world_size * ALIGNMENT
        return -(-num_elements // unit) * unit

    def start(self, rows: Tensor) -> Sum:
        """Start to sum all ranks' `rows` [num_rows, padded length]. All ranks call in one order.

        The first row is overwritten with the mean. On GPUs all of it is queued on a stream, in
        parallel with the backward pass. On CPUs the sums are gathered when `Sum.gather` is called.
        """
        if self._stream is None:
            return Sum(self, rows)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            started = Sum(self, rows)
            started.gather(_in_order)
        return started

    # --- the two halves ---------------------------------------------------------------------------

    def scatter(self, rows: Tensor) -> tuple[Tensor, Started | None]:
        """Send each rank its chunk of `rows`. Returns this rank's chunk of all nodes, in order.

        On GPUs with even shares, the row of this rank's own node is left as it is: garbage.
        """
        if self._group is None:
            return rows, None
        chunk = rows.shape[1] // self._world_size
        if rows.is_cuda and self._is_even:
            received = rows.new_empty(self._world_size, chunk)
            parts, pieces = list(received), list(rows.view(self._world_size, chunk))
            parts[self._rank] = pieces[self._rank] = rows.new_empty(0)  # NCCL would copy it
            return received, self._group.swap(parts, pieces)
        sent = rows.view(self.num_rows, self._world_size, chunk).transpose(0, 1).contiguous()
        counts = [len(one) for one in self._nodes]
        received = rows.new_empty(sum(counts), chunk)
        started = self._group.all_to_all(
            received.view(-1),
            sent.view(-1),
            received_from=[count * chunk for count in counts],
            sent_to=[self.num_rows * chunk] * self._world_size,
        )
        return received, started

    def gather(self, received: Tensor, out: Tensor) -> Started | None:
        """Add the chunk of all nodes, and gather all ranks' chunks of the mean in `out`."""
        mine = out.view(self._world_size, -1)[self._rank]
        if received.is_cuda and self._is_even:
            from entrenar_py.train.canonical import kernels  # needs triton

            own = None if self._group is None else (self._rank, mine)
            kernels.add_tree(received, scale=self._scale, out=mine, own=own)
        else:
            spans = [span for of_rank in self._nodes for span in of_rank]
            torch.mul(add_nodes(received, spans), self._scale, out=mine)
        return None if self._group is None else self._group.all_gather(out, mine)


class Sum:
    """A sum that was started. `mean` [padded length] is valid once `wait` has returned."""

    def __init__(self, exchange: Exchange, rows: Tensor) -> None:
        self._exchange, self._rows = exchange, rows
        self.mean = rows[0]
        self._received: Tensor | None
        self._received, self._started = exchange.scatter(rows)

    @property
    def is_over(self) -> bool:
        """Whether no collective of it can write to memory any more."""
        return self._started is None or self._started.is_over()

    def gather(self, wait: Wait) -> None:
        """Wait for the chunks of this rank, add them, and start to gather the mean, once."""
        if self._received is None:
            return
        if self._started is not None:
            wait(self._started)
        self._started = self._exchange.gather(self._received, self.mean)
        self._received = None  # as large as the gradients

    def wait(self, wait: Wait) -> None:
        """Wait for the mean."""
        if self._started is not None:
            wait(self._started)


def _in_order(_: Started) -> None:
    """Wait for nothing: what follows on a GPU's stream comes after it anyway."""
