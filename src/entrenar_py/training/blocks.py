"""The reduced vector in parts: they travel and are added one by one, the last layers' first.

A sum along the tree is elementwise, so its bits do not depend on where the vector is cut.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from entrenar_py.training import reduction
from entrenar_py.training.reduction import Node, Vector
from entrenar_py.training.state import Buffer

Memory = NDArray[np.uint8]


BLOCK_BYTES_MAX = 2**22
# What costs more in messages than it saves by going and coming at the same time.
_BLOCK_BYTES_MIN = 2**19
_AT_THE_SAME_TIME = 3


def num_blocks(num_elements: int, num_owners: int) -> int:
    """Return the number of parts for `num_elements` float32 that `num_owners` average.

    Each owner has as many: some, so that one is averaged while another comes, but no small ones.
    """
    part_bytes = 4 * num_elements // num_owners
    each = max(
        *(1, -(-part_bytes // BLOCK_BYTES_MAX)),
        min(_AT_THE_SAME_TIME, part_bytes // _BLOCK_BYTES_MIN),
    )
    return min(each * num_owners, num_elements)


class Blocks:
    """`num_elements` float32 in `count` parts whose sizes differ by at most one."""

    def __init__(self, num_elements: int, count: int) -> None:
        assert 1 <= count <= num_elements, "no part is empty"
        self.count = count
        self._num_elements = num_elements

    def part(self, block: int) -> slice:
        """Return the place of `block` in the vector."""
        return slice(
            block * self._num_elements // self.count, (block + 1) * self._num_elements // self.count
        )

    def num_bytes(self, block: int) -> int:
        """Return the length of `block` on its way."""
        part = range(self._num_elements)[self.part(block)]
        return 4 * len(part)

    @property
    def num_bytes_max(self) -> int:
        """The length of the longest block."""
        return 4 * -(-self._num_elements // self.count)

    def order(self) -> range:
        """Return the order on the wire: from the vector's end, whose gradients come first."""
        return range(self.count - 1, -1, -1)


class Sums:
    """The nodes of one step as they come, block by block, from whoever delivers them.

    What came of a delivery counts when it is whole (`deliver`), or when its block is averaged
    before that: then it has the bits that anybody's would have. The memory of nodes that are added
    is used again: for the next ones it costs more to get than to fill.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._whole: dict[int, list[Node]] = {}
        self._complete: dict[int, list[Node]] = {}  # block -> nodes of all shards
        self._open: dict[int, dict[int, list[Node]]] = {}  # rank -> block -> nodes
        self._lent: dict[int, list[Memory]] = {}  # block -> memory of its nodes
        self._free: list[Memory] = []
        self._room_bytes = 0  # the most that was asked for

    def room(self, num_bytes: int) -> memoryview:
        """Memory for a node that will be taken, not zeroed."""
        # Blocks have two sizes. All memory is of the larger one, so that any fits any: else some
        # would lie unused, and more be got with each step.
        self._room_bytes = max(self._room_bytes, num_bytes)
        while self._free:
            memory = self._free.pop()
            if memory.nbytes >= num_bytes:
                return memory.data[:num_bytes]
        return np.empty(self._room_bytes, np.uint8).data[:num_bytes]

    def take(self, rank: int, block: int, node: Node, payload: Buffer | None = None) -> None:
        """A node of the delivery that `rank` has begun; its vector is only `block` of it.

        `payload` is the memory that its vector lies in, which is this object's from now on; None if
        it is somebody else's, and then the vector must be read-only.
        """
        self._open.setdefault(rank, {}).setdefault(block, []).append(node)
        if isinstance(payload, memoryview) and isinstance(payload.obj, np.ndarray):
            self._lent.setdefault(block, []).append(payload.obj)

    def deliver(self, rank: int) -> None:
        """All that `rank` has begun to deliver is there."""
        for block, nodes in self._open.pop(rank, {}).items():
            self._whole.setdefault(block, []).extend(nodes)

    def forget(self, rank: int) -> None:
        """Forget the blocks that `rank` began to deliver, which will never be whole."""
        self._open.pop(rank, None)

    def clear(self) -> None:
        """The next step, or the same one again."""
        self._whole.clear()
        self._open.clear()
        self._complete.clear()
        self._lent.clear()

    def complete(self, block: int) -> None:
        """All of `block` is there, whoever it is of and whoever goes now: it can be added, also by
        another thread than the one that takes and delivers what comes."""
        nodes = self._whole.pop(block, [])
        for delivered in self._open.values():
            nodes += delivered.pop(block, [])
        self._complete[block] = nodes

    def root(self, block: int) -> Node:
        """The sum of all shards, in memory of one of the nodes; ValueError where some lack."""
        if block not in self._complete:
            self.complete(block)
        return reduction.root(self._complete.pop(block), self._num_shards)

    def average(self, block: int, scale: float, *, out: Vector) -> tuple[float, float] | None:
        """The sum of all shards, divided by what it counts and by `scale`, into `out`.

        The summed loss and its weight; None where that or a mean is not finite. ValueError where
        shards lack.
        """
        total = self.root(block)
        finite = average(total, scale, out=out)
        self._free += self._lent.pop(block, [])
        return (total.loss, total.weight) if finite else None


def average(total: Node, scale: float, *, out: Vector) -> bool:
    """`total` divided by what it counts and by `scale`, into `out`; whether that is finite."""
    with np.errstate(over="ignore"):
        np.divide(total.vector, np.float32(total.weight * scale), out=out)
    return bool(np.isfinite(out).all()) and math.isfinite(total.loss)


def payload_of(vector: Vector) -> memoryview:
    """Return the bytes of `vector` as they are sent: float32, little-endian; a view if possible."""
    return vector.astype("<f4", copy=False).data.cast("B")


def vector_of(payload: Buffer) -> Vector:
    """The float32 elements in `payload`, little-endian; a view of it where that is native."""
    return np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
