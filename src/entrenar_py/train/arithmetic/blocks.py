"""The reduced vector: the place of each tensor in it, and the blocks in which it is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.checkpoint import Buffer
from entrenar_py.train.arithmetic.reduction import Node, Vector
from entrenar_py.train.arithmetic.tensors import TensorSpec

# The place of each tensor in the flat vector that is reduced.
#
# The vector holds the gradients of the trainable tensors in the specs' order, then the statistics
# of the buffers, so that both are added along the same tree.


@dataclass(frozen=True)
class Layout:
    """Slices of the flat vector, by tensor name, for `specs` in their order."""

    specs: tuple[TensorSpec, ...]

    @cached_property
    def trainable(self) -> dict[str, slice]:
        """Slices of the trainable tensors."""
        return _slices((s for s in self.specs if s.role == "trainable"), start=0)

    @cached_property
    def buffers(self) -> dict[str, slice]:
        """Slices of the buffers' statistics, after the gradients."""
        return _slices((s for s in self.specs if s.role == "buffer"), start=self.num_trainable)

    @cached_property
    def num_trainable(self) -> int:
        """The number of elements of all trainable tensors."""
        return sum(prod(s.shape) for s in self.specs if s.role == "trainable")

    @cached_property
    def decayed(self) -> Vector | None:
        """The mask of weight decay, 1 where it applies, else 0: float32 [num_trainable].

        None if it applies nowhere.
        """
        mask = np.zeros(self.num_trainable, dtype=np.float32)
        for spec in self.specs:
            if spec.role == "trainable" and spec.decayed:
                mask[self.trainable[spec.name]] = 1
        return mask if mask.any() else None

    @cached_property
    def num_elements(self) -> int:
        """The number of elements of the flat vector: gradients and statistics."""
        return sum(prod(s.shape) for s in self.specs if s.role != "frozen")

    @cached_property
    def digest(self) -> str:
        """32 hex digits that identify the manifest: each tensor's name, shape, role and decay."""
        manifest = [[s.name, list(s.shape), s.role, s.decayed] for s in self.specs]
        return str(blake3(json.dumps(manifest).encode()).hexdigest(16))

    def locate(self, position: int) -> tuple[str, int]:
        """Return the tensor at `position` of the flat vector, and the element within the tensor.

        Raises IndexError for a position outside the vector.
        """
        for name, part in {**self.trainable, **self.buffers}.items():
            if part.start <= position < part.stop:
                return name, position - part.start
        raise IndexError(f"position {position} lies outside the flat vector")


def _slices(specs: Iterable[TensorSpec], start: int) -> dict[str, slice]:
    slices = {}
    for spec in specs:
        slices[spec.name] = slice(start, start + prod(spec.shape))
        start += prod(spec.shape)
    return slices


Memory = NDArray[np.uint8]


BLOCK_BYTES_MAX = 2**22
# A smaller block costs more in messages than it saves by overlapping transfers.
_BLOCK_BYTES_MIN = 2**19
_AT_THE_SAME_TIME = 3


def num_blocks(num_elements: int, num_owners: int) -> int:
    """Return the number of blocks of a vector of `num_elements` float32, for `num_owners`.

    Every owner averages the same number of blocks. A large part is divided so that its owner
    averages one block while it receives the next.
    """
    part_bytes = 4 * num_elements // num_owners
    each = max(
        *(1, -(-part_bytes // BLOCK_BYTES_MAX)),
        min(_AT_THE_SAME_TIME, part_bytes // _BLOCK_BYTES_MIN),
    )
    return min(each * num_owners, num_elements)


class Blocks:
    """The division of `num_elements` float32 into `count` blocks; sizes differ by at most one."""

    def __init__(self, num_elements: int, count: int) -> None:
        assert 1 <= count <= num_elements, "no part is empty"
        self.count = count
        self.num_elements = num_elements

    def part(self, block: int) -> slice:
        """Return the slice of the vector that `block` covers."""
        return slice(
            block * self.num_elements // self.count, (block + 1) * self.num_elements // self.count
        )

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on the wire, in bytes."""
        part = range(self.num_elements)[self.part(block)]
        return 4 * len(part)

    @property
    def num_bytes_max(self) -> int:
        """The length of the longest block on the wire, in bytes."""
        return 4 * -(-self.num_elements // self.count)

    def order(self) -> range:
        """Return the blocks in sending order: from the vector's end, where gradients come first."""
        return range(self.count - 1, -1, -1)


class Sums:
    """Collects the tree nodes of one step, block by block, as workers deliver them.

    A worker's nodes count when its delivery is complete (`deliver`). `complete` counts the nodes of
    one block even before that. Both are correct, because any worker would send the same bits. The
    memory of summed nodes is reused, because allocating it costs more than filling it.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._whole: dict[int, list[Node]] = {}
        self._complete: dict[int, list[Node]] = {}  # block -> nodes of all shards
        self._open: dict[int, dict[int, list[Node]]] = {}  # rank -> block -> nodes
        self._lent: dict[int, list[Memory]] = {}  # block -> memory of its nodes
        self._free: list[Memory] = []
        self._room_bytes = 0  # the largest size requested so far

    def room(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of memory, not zeroed, for a node that will be passed to `take`."""
        # Blocks have two sizes. All memory has the larger one, so that any piece fits any block.
        # Otherwise some memory would stay unused, and each step would allocate more.
        self._room_bytes = max(self._room_bytes, num_bytes)
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= num_bytes:
                return memory.data[:num_bytes]
        return np.empty(self._room_bytes, np.uint8).data[:num_bytes]

    def take(self, rank: int, block: int, node: Node, payload: Buffer | None = None) -> None:
        """Add a node of `block` to the unfinished delivery of `rank`.

        `payload` is the memory of the node's vector, and belongs to this object from now on. Pass
        None if the memory has a different owner; the vector must then be read-only.
        """
        self._open.setdefault(rank, {}).setdefault(block, []).append(node)
        if isinstance(payload, memoryview) and isinstance(payload.obj, np.ndarray):
            self._lent.setdefault(block, []).append(payload.obj)

    def deliver(self, rank: int) -> None:
        """Mark the delivery of `rank` as complete."""
        for block, nodes in self._open.pop(rank, {}).items():
            self._whole.setdefault(block, []).extend(nodes)

    def forget(self, rank: int) -> None:
        """Discard the unfinished delivery of `rank`, which will never be complete."""
        self._open.pop(rank, None)

    def clear(self) -> None:
        """Discard everything, for the next step or a repetition of this one."""
        self._whole.clear()
        self._open.clear()
        self._complete.clear()
        self._lent.clear()

    def complete(self, block: int) -> None:
        """Mark `block` as complete with the nodes that have arrived. Then any thread may sum it."""
        nodes = self._whole.pop(block, [])
        for delivered in self._open.values():
            nodes += delivered.pop(block, [])
        self._complete[block] = nodes

    def root(self, block: int) -> Node:
        """Return the sum of `block` over all shards. Raises ValueError if shards are missing."""
        if block not in self._complete:
            self.complete(block)
        return reduction.root(self._complete.pop(block), self._num_shards)

    def average(self, block: int, scale: float, *, out: Vector) -> tuple[float, float] | None:
        """Write the mean of `block` to `out`; return the summed loss and its weight.

        The mean is the sum over all shards, divided by its weight and by `scale`. Returns None if
        the loss or a mean is not finite. Raises ValueError if shards are missing.
        """
        total = self.root(block)
        finite = average(total, scale, out=out)
        self._free += self._lent.pop(block, [])
        return (total.loss, total.weight) if finite else None


class Reduction:
    """The sums of a coordinator's current step, and the vector that it sends to workers.

    `vector` is float32 [num_elements], divided into parts by `blocks`. It has the averages of the
    reduced blocks, and later the new weights. `total` is the step's summed loss and its weight,
    from the blocks `of_loss`. `seconds` is the time spent on reducing, by `clock`. Sums are
    multiplied by `scale`.
    """

    def __init__(
        self, parts: Blocks, *, num_shards: int, scale: float, clock: Callable[[], float]
    ) -> None:
        self.blocks, self.of_loss = parts, range(parts.count)
        self.vector: Vector = np.empty(parts.num_elements, np.float32)
        self.sums = Sums(num_shards)
        self.total, self.seconds = (0.0, 0.0), 0.0
        self._scale, self._clock = scale, clock
        self._reduced: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """True if all blocks of the step are reduced."""
        return len(self._reduced) == self.blocks.count

    def part(self, block: int) -> Vector:
        """Return the part of `vector` for `block`, as a view."""
        return self.vector[self.blocks.part(block)]

    def clear(self) -> None:
        """Forget all nodes: a step begins or restarts."""
        self.sums.clear()
        self._reduced.clear()
        self.seconds = 0.0

    def reduce(self, block: int) -> tuple[float, float] | None:
        """Add and average `block`, which is complete; return the result as `Sums.average` does."""
        since = self._clock()
        averaged = self.sums.average(block, self._scale, out=self.part(block))
        if averaged is not None:
            self.total = averaged if block in self.of_loss else self.total
            self.seconds += self._clock() - since
            self._reduced.add(block)
        return averaged


def average(total: Node, scale: float, *, out: Vector) -> bool:
    """Write `total` divided by its weight and by `scale` to `out`; return whether all is finite."""
    with np.errstate(over="ignore"):
        np.divide(total.vector, np.float32(total.weight * scale), out=out)
    return bool(np.isfinite(out).all()) and math.isfinite(total.loss)


def payload_of(vector: Vector) -> memoryview:
    """Return `vector` as little-endian float32 for sending, as a view where possible."""
    return vector.astype("<f4", copy=False).data.cast("B")


def vector_of(payload: Buffer) -> Vector:
    """Return the little-endian float32 vector in `payload`, as a view on little-endian machines."""
    return np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
